// Summary, settings and environment of the runs.

function makeSection(id, title, text) {
  const heading = el("h2", { id: `${id}-title` }, title);
  return el("section", { id, "aria-labelledby": heading.id }, el("header", {}, heading, text ? el("p", {}, text) : null));
}

function runLabel(run) {
  const swatch = el("i", { class: "swatch" });
  const paint = () => { swatch.style.background = paletteColor(run.index); };
  paint();
  redraws.theme.push(paint);
  return el("span", { style: { display: "inline-flex", gap: "7px", alignItems: "center" } }, report.runs.length > 1 ? swatch : null, run.name);
}

const PART_NAMES = { curves: "curves", timeline: "timeline", rows: "completions", system: "environment" };

function missingNote(run, part) {
  const who = report.runs.length > 1 ? `${run.name} has no ${PART_NAMES[part]}: ` : `No ${PART_NAMES[part]}: `;
  return el("p", { class: "card note" }, who, `${run.missing[part]}.`);
}

function withNote(section, part, text) {
  if (text) section.append(el("p", { class: "card note" }, text));
  else section.append(...report.runs.filter((run) => run.missing[part]).map((run) => missingNote(run, part)));
  return section;
}

/** Buttons that select one of several runs. */
function runSelect(runs, onChange) {
  const buttons = runs.map((run, i) => el("button", { type: "button", class: "chip", "aria-pressed": String(i === 0), onclick: () => {
    buttons.forEach((button, k) => button.setAttribute("aria-pressed", String(k === i)));
    onChange(run);
  } }, runLabel(run)));
  return el("div", { class: "controls", role: "group", "aria-label": "Run", style: { gap: "6px" } }, ...buttons);
}

function fact(name, value) {
  return value === null || value === undefined || value === "" ? null : el("div", {}, el("dt", {}, name), el("dd", {}, value));
}

const STATUS = { complete: "complete", running: "running", interrupted: "interrupted", "ended early": "ended early" };

function summarySection() {
  const section = makeSection("summary", "Summary", null);
  section.append(el("div", { class: report.runs.length > 1 ? "pair" : "stack" }, ...report.runs.map(runCard)));
  const evaluated = report.runs.filter((run) => run.evaluations.length);
  if (evaluated.length) section.append(evaluationTable(evaluated));
  section.append(healthCard());
  return section;
}

function runCard(run) {
  const status = run.status === "interrupted" ? `interrupted by ${run.summary.interrupted_by}` : STATUS[run.status];
  const groups = run.summary.groups;
  const policy = run.roles.find((role) => ["actor", "student"].includes(role.name)) ?? run.roles.find((role) => role.model);
  const rollout = run.roles.find((role) => role.name === "rollout");
  const schedule = run.schedule?.kind && (run.schedule.max_staleness === undefined ? run.schedule.kind : `${run.schedule.kind}, staleness up to ${run.schedule.max_staleness}`);
  return el("div", { class: "card pad" },
    el("div", { class: "run-head" }, el("h3", {}, runLabel(run)), el("span", { class: `badge ${run.status.split(" ")[0]}` }, status)),
    el("dl", { class: "facts" },
      fact("Recipe", run.recipe),
      fact("Steps", run.steps_requested ? `${whole.format(run.steps)} of ${whole.format(run.steps_requested)}` : whole.format(run.steps)),
      fact("Time", run.seconds === null ? null : formatSeconds(run.seconds)),
      fact("Peak memory", run.peak_memory_mb ? `${Number((run.peak_memory_mb / 1000).toPrecision(3))} GB` : null),
      fact("Health checks", findingsLink(run)),
      fact("Seed", run.seed === null ? null : String(run.seed)),
      fact("Schedule", schedule),
      fact("Model", policy?.model),
      fact("Rollout engine", rollout?.engine),
      fact("Restarts", run.summary.restarts ? String(run.summary.restarts) : null),
      fact("Lost replicas", run.summary.replicas_lost ? String(run.summary.replicas_lost) : null),
      fact("Groups", groups && Object.keys(groups).length ? Object.entries(groups).filter(([, n]) => n).map(([name, n]) => `${whole.format(n)} ${name}`).join(", ") : null),
      fact("Started", run.system?.started?.replace("T", " ").slice(0, 16)),
      fact("Folder", run.path)),
    run.profiles.length ? el("details", {}, el("summary", {}, plural(run.profiles.length, "profile")),
      el("ul", {}, ...run.profiles.map((profile) => el("li", {}, el("a", { href: encodeURI(profile.path), download: "" }, profile.name))))) : null);
}

/** A link to the findings of the health checks. Its text is their number. */
function findingsLink(run) {
  const count = run.findings?.length;
  const text = count === undefined ? "not run" : count ? plural(count, "finding") : "no findings";
  return el("a", { href: `#${findingsId(run)}`, class: count ? "bad" : "" }, text);
}

const findingsId = (run) => `findings-${run.index}`;

function evaluationTable(runs) {
  // The step is part of the heading if all values have the same step.
  const stepHead = (title, key) => {
    const steps = new Set(runs.flatMap((run) => run.evaluations.map((entry) => entry[key])));
    return [title, steps.size === 1 ? el("div", {}, `step ${[...steps][0]}`) : ""];
  };
  const several = report.runs.length > 1;
  const hasIntervals = runs.some((run) => run.evaluations.some((entry) => entry.first_interval || entry.last_interval));
  const value = (number, interval, step) => el("td", { class: "num", title: `step ${step}` }, formatNumber(number), interval ? el("div", { class: "muted" }, `${formatNumber(interval[0])} to ${formatNumber(interval[1])}`) : null);
  const rows = runs.flatMap((run) => run.evaluations.map((entry) => {
    const change = entry.last - entry.first;
    const isGood = entry.name.startsWith("validation_loss") ? change < 0 : change > 0;
    const isScore = !entry.name.startsWith("evaluation/");
    const isClear = hasIntervals && !entry.has_failures && entry.first_interval && entry.last_interval && (entry.first_interval[1] < entry.last_interval[0] || entry.last_interval[1] < entry.first_interval[0]);
    const tone = isScore && (isClear || !entry.first_interval) && change ? (isGood ? "num good" : "num bad") : "num";
    const isSame = entry.first_step === entry.last_step;
    return el("tr", {}, several ? el("td", {}, runLabel(run)) : null, el("th", { scope: "row" }, entry.name),
      value(entry.first, entry.first_interval, entry.first_step),
      isSame ? el("td", { class: "num" }, "-") : value(entry.last, entry.last_interval, entry.last_step),
      el("td", { class: tone }, isSame ? "-" : signed(change)));
  }));
  return el("div", { class: "card pad scroll" }, el("h3", {}, "Evaluation before and after"),
    el("table", {}, el("thead", {}, el("tr", {}, several ? el("th", {}, "Run") : null, el("th", {}, "Metric"), el("th", { class: "num" }, ...stepHead("First", "first_step")), el("th", { class: "num" }, ...stepHead("Last", "last_step")), el("th", { class: "num" }, "Change"))),
      el("tbody", {}, ...rows)),
    hasIntervals ? el("p", { class: "note", style: { marginTop: "8px" } }, "The second line of a value is its 95 % interval over the prompts. A change in color is larger than both intervals, in evaluations without failed rewards.") : null);
}

function healthCard() {
  const card = el("div", { class: "card pad stack" }, el("h3", {}, "Health checks"));
  for (const run of report.runs) {
    const runPrefix = report.runs.length > 1 ? `${run.name}: ` : "";
    const runFindings = el("div", { class: "stack", id: findingsId(run) });
    card.append(runFindings);
    if (run.findings === null) runFindings.append(el("p", { class: "note" }, runPrefix, "This run has no health checks."));
    else if (!run.findings.length) runFindings.append(el("p", { class: "note" }, runPrefix, "no findings."));
    for (const finding of run.findings ?? []) {
      const steps = finding.step === finding.last_step ? `step ${finding.step}` : `steps ${finding.step} to ${finding.last_step}`;
      runFindings.append(el("div", { class: "finding" }, el("div", {}, el("strong", {}, finding.check.replaceAll("_", " ")), el("span", { class: "muted" }, ` · ${report.runs.length > 1 ? `${run.name}, ` : ""}${steps}`)), el("div", {}, finding.message)));
    }
  }
  return card;
}

function settingsSection() {
  const several = report.runs.length > 1;
  const section = makeSection("settings", several ? "Differences of the settings" : "Settings", several ? "Keys of config.yaml with different values." : "config.yaml of the run, with all defaults.");
  const differing = report.head.settings.filter((entry) => entry.differs);
  const search = el("input", { type: "search", placeholder: "Filter settings", "aria-label": "Filter settings", oninput: () => fill() });
  const all = el("input", { type: "checkbox", checked: !several, onchange: () => fill() });
  const count = el("span", { class: "note" });
  const body = el("tbody");
  function fill() {
    const words = search.value.toLowerCase();
    const entries = (all.checked ? report.head.settings : differing).filter((entry) => [entry.key, ...entry.values].some((text) => (text ?? "").toLowerCase().includes(words)));
    count.textContent = plural(entries.length, "setting");
    body.replaceChildren(...entries.map((entry) => el("tr", {}, el("th", { scope: "row", class: "mono" }, entry.key),
      ...entry.values.map((value) => el("td", { class: "mono" }, value === null ? el("span", { class: "muted" }, "absent") : value)))));
  }
  fill();
  const heads = several ? report.runs.map((run) => el("th", {}, runLabel(run))) : [el("th", {}, "Value")];
  section.append(el("div", { class: "controls" }, el("label", { class: "grow search" }, search), several ? el("label", {}, all, "also equal values") : null, count),
    el("div", { class: "card pad scroll", style: { maxHeight: "520px" } }, el("table", { class: "settings" }, el("thead", {}, el("tr", {}, el("th", {}, "Setting"), ...heads)), body)));
  return section;
}

function environmentSection() {
  const section = makeSection("environment", "Environment", "Versions of packages and the machine of the driver at the last start.");
  const runs = report.runs.filter((run) => run.system);
  if (runs.length) {
    const flat = (system) => ({
      Started: system.started, Command: (system.command ?? []).join(" "),
      System: system.machine?.system, Processor: system.machine?.processor, Cores: system.machine?.cores,
      "Memory (GB)": system.machine?.memory_gb, GPUs: (system.machine?.gpus ?? []).join(", ") || "none",
      ...system.versions,
    });
    const values = runs.map((run) => flat(run.system));
    const keys = [...new Set(values.flatMap((value) => Object.keys(value)))];
    const rows = keys.map((key) => {
      const own = values.map((value) => value[key]);
      const differs = new Set(own).size > 1 && !["Started", "Command"].includes(key);
      return el("tr", {}, el("th", { scope: "row" }, key), ...own.map((value) => el("td", { class: differs ? "bad" : "" }, String(value ?? "-"))));
    });
    const heads = runs.map((run) => el("th", {}, report.runs.length > 1 ? runLabel(run) : ""));
    section.append(el("div", { class: "card pad scroll" }, el("table", {}, heads.length > 1 ? el("thead", {}, el("tr", {}, el("th", {}, ""), ...heads)) : null, el("tbody", {}, ...rows))));
  }
  for (const run of report.runs) if (run.missing.system) section.append(missingNote(run, "system"));
  return section;
}
