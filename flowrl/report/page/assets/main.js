// Start of the page: theme, runs, navigation and sections.

const report = { head: null, runs: [] };

function startTheme() {
  const media = matchMedia("(prefers-color-scheme: dark)");
  const order = ["auto", "light", "dark"];
  let choice = "auto";
  try {
    choice = order.includes(localStorage.flowrlTheme) ? localStorage.flowrlTheme : "auto";
  } catch { /* A page that was opened as a file may have no storage. */ }
  const apply = () => {
    document.documentElement.dataset.theme = choice === "auto" ? (media.matches ? "dark" : "light") : choice;
    $("theme").textContent = `Theme: ${choice}`;
    redraws.theme.forEach((redraw) => redraw());
  };
  $("theme").addEventListener("click", () => {
    choice = order[(order.indexOf(choice) + 1) % 3];
    try {
      localStorage.flowrlTheme = choice;
    } catch { /* as above */ }
    apply();
  });
  media.addEventListener("change", apply);
  apply();
}

function showRuns() {
  document.documentElement.dataset.runs = report.runs.length > 1 ? "several" : "one";
  $("runs").replaceChildren(...report.runs.map((run) => {
    if (report.runs.length === 1) return el("span", { class: "chip" }, run.name);
    const chip = el("button", { type: "button", class: "chip", "aria-pressed": String(run.isShown), title: "Show or hide this run in the curves and the completions", onclick: () => {
      run.isShown = !run.isShown;
      chip.setAttribute("aria-pressed", String(run.isShown));
      redraws.runs.forEach((redraw) => redraw());
    } }, runLabel(run));
    return chip;
  }));
}

function startNavigation() {
  const sections = [...document.querySelectorAll("main > section")];
  const links = sections.map((section) => el("a", { href: `#${section.id}` }, section.querySelector("h2").textContent));
  $("nav").replaceChildren(...links);
  // The tabs have one or more rows, so the height of the header depends on the width of the window.
  const header = $("nav").parentElement;
  const setScrollPadding = () => { document.documentElement.style.scrollPaddingTop = `${header.offsetHeight + 22}px`; };
  new ResizeObserver(setScrollPadding).observe(header);
  setScrollPadding();
  const mark = () => {
    const top = header.offsetHeight + 58;
    let current = 0;
    sections.forEach((section, i) => { if (section.getBoundingClientRect().top < top) current = i; });
    if (innerHeight + scrollY >= document.body.scrollHeight - 4) current = sections.length - 1;
    links.forEach((link, i) => {
      if (i !== current) link.removeAttribute("aria-current");
      else if (!link.hasAttribute("aria-current")) {
        link.setAttribute("aria-current", "true");
        $("nav").scrollTo({ left: link.offsetLeft - 40 });
      }
    });
  };
  addEventListener("scroll", mark, { passive: true });
  mark();
}

async function start() {
  startTheme();
  report.head = await readPart("head");
  report.runs = report.head.runs.map((run, index) => ({ ...run, index, isShown: true }));
  await Promise.all(report.runs.map(async (run) => { run.curves = await readPart(`curves-${run.index}`); }));
  showRuns();
  const main = $("main");
  const add = (section) => section && main.append(section);
  add(summarySection());
  add(curvesSection());
  add(rewardsSection());
  add(stalenessSection());
  add(timelineSection());
  add(placementSection());
  add(completionsSection());
  add(settingsSection());
  add(environmentSection());
  startNavigation();
  $("footer").textContent = `Written ${report.head.created.replace("T", " ").slice(0, 16)} by flowrl ${report.head.flowrl}. This file contains all of its data and uses no network.`;
  performance.mark("shown");
  for (const load of loaders) {
    await new Promise((resume) => setTimeout(resume)); // the page reacts to the user between two sections
    await load();
  }
  if (location.hash) $(location.hash.slice(1))?.scrollIntoView();
  performance.mark("ready");
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => {
  $("main").append(el("p", { class: "finding" }, `The report could not be shown (${error.message}). It needs a browser of 2023 or newer.`));
  throw error;
});
