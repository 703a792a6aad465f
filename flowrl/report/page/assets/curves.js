// Curves of one or several runs, rewards by name, staleness and buffer.

const PANELS = [
  ["Mean reward", "", ["reward"]],
  ["Mean reward of selected responses", "", ["reward_selected"]],
  ["Held-out accuracy", "", ["accuracy"]],
  ["Agreement with the teacher", "", ["agreement"]],
  ["Accuracy on pairs", "", ["actor/accuracy", "reward/accuracy"]],
  ["Reward of chosen and rejected responses", "", ["actor/chosen_reward", "actor/rejected_reward", "reward/chosen_reward", "reward/rejected_reward"]],
  ["Loss", "", ["loss", "actor/loss", "reward/loss"]],
  ["Validation loss", "nats per token", ["validation_loss"]],
  ["KL to the reference", "nats per token", ["kl", "actor/kl"]],
  ["KL to the teacher", "nats per token", ["actor/reverse_kl", "actor/forward_kl"]],
  ["Entropy", "nats per token", ["actor/entropy"]],
  ["Response length", "tokens", ["response_length"]],
  ["Truncated responses", "fraction", ["truncated_fraction"]],
  ["Gradient norm", "before clipping", ["actor/grad_norm", "critic/grad_norm", "reward/grad_norm"]],
  ["Value loss", "", ["critic/loss"]],
  ["Explained variance", "", ["explained_variance"]],
  ["Rollout and trainer gap", "nats", ["rollout_gap", "actor/rollout_gap"]],
  ["Throughput", "tokens per second", ["tokens_per_s"]],
  ["Model FLOPs utilization", "fraction of the peak", ["usage/actor/mfu", "usage/critic/mfu", "usage/reward/mfu"]],
  ["GPU memory in use at the peak", "fraction", ["usage/actor/memory_fraction", "usage/critic/memory_fraction", "usage/rollout/memory_fraction"]],
  ["Step duration", "seconds", ["seconds"]],
];

const STALENESS_PANELS = [
  ["Staleness", "versions", ["staleness", "staleness_max"]],
  ["Groups", "prompts", ["buffer_depth", "running_groups", "waiting_groups"]],
  ["Dropped groups", "per step", ["dropped_groups", "dropped_stale", "dropped_refused", "dropped_equal_scores", "dropped_failed"]],
  ["Idle fraction of the step", "", ["idle_rollout", "idle_actor"]],
  ["Waits", "seconds per step", ["wait_data_s", "wait_weights_s"]],
];

/** Returns the points of a metric of a run, or null. Runs keep points per group of steps. */
function pointsOf(run, metric, axis) {
  for (const group of run.curves?.groups ?? []) {
    const y = group.metrics[metric];
    if (y) return group[axis] ? { x: group[axis], y, low: group.low?.[metric], high: group.high?.[metric] } : null;
  }
  return null;
}

const metricsOf = (runs) =>
  [...new Set(runs.flatMap((run) => (run.curves?.groups ?? []).flatMap((group) => Object.keys(group.metrics))))].sort();

const shownRuns = () => report.runs.filter((run) => run.isShown);

/** Returns a function that lists the lines of a panel: a color per run, or per metric if there is one run. */
function linesOf(metrics, view, label = (metric) => metric) {
  return () => {
    const runs = shownRuns();
    const present = metrics.filter((metric) => runs.some((run) => pointsOf(run, metric, view.axis)));
    return runs.flatMap((run) =>
      present.flatMap((metric, i) => {
        const points = pointsOf(run, metric, view.axis);
        if (!points) return [];
        const scale = view.axis === "time" ? view.unit[1] : 1;
        const x = scale === 1 ? points.x : points.x.map((value) => value / scale);
        const several = report.runs.length > 1;
        const name = !several ? label(metric) : present.length > 1 ? `${run.name} ${label(metric)}` : run.name;
        return [{ ...points, x, name, color: several ? run.index : i, dash: several ? i : 0 }];
      }),
    );
  };
}

function hasAny(metrics) {
  return metrics.some((metric) => report.runs.some((run) => pointsOf(run, metric, "step")));
}

const xAxes = { step: "Step", time: "Time", tokens: "Tokens" };

/** Controls of a view: x axis, smoothing, logarithmic scale and the zoom. */
function viewControls(view) {
  const longest = Math.max(1, ...report.runs.flatMap((run) => (run.curves?.groups ?? []).map((g) => g.time?.[g.time.length - 1] ?? 0)));
  view.unit = longest > 7200 ? ["hours", 3600] : longest > 300 ? ["minutes", 60] : ["seconds", 1];
  const axes = Object.entries(xAxes).filter(([axis]) => report.runs.some((run) => run.curves?.groups.some((group) => group[axis])));
  const buttons = axes.map(([axis, label]) =>
    el("button", { type: "button", "aria-pressed": String(axis === "step"), onclick: () => choose(axis) }, label));
  function choose(axis) {
    view.axis = axis;
    axes.forEach(([name], i) => buttons[i].setAttribute("aria-pressed", String(name === axis)));
    view.xLabel = { step: "step", time: `time since the start (${view.unit[0]})`, tokens: "response tokens" }[axis];
    view.xName = { step: "step", time: view.unit[0], tokens: "tokens" }[axis];
    view.setRange(null);
  }
  const smoothing = el("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: "0", oninput: () => {
    view.smoothing = Number(smoothing.value);
    output.textContent = smoothing.value === "0" ? "off" : smoothing.value;
    view.draw();
  } });
  const output = el("span", { class: "mono" }, "off");
  const log = el("input", { type: "checkbox", onchange: () => { view.isLog = log.checked; view.draw(); } });
  const reset = el("button", { type: "button", class: "hidden", onclick: () => view.setRange(null) }, "Reset zoom");
  view.onRange = (range) => reset.classList.toggle("hidden", range === null);
  return [
    el("div", { class: "segments", role: "group", "aria-label": "x axis" }, ...buttons),
    el("label", { class: "grow" }, "Smoothing", smoothing, output),
    el("label", {}, log, "Log scale"),
    reset,
  ];
}

function curvesSection() {
  const section = makeSection("curves", "Curves", "Drag over a plot to zoom, double-click to reset.");
  const metrics = metricsOf(report.runs);
  if (!metrics.length) return withNote(section, "curves");
  const view = new View();
  view.axis = "step";
  const grid = el("div", { class: "grid" });
  const added = new Map();
  for (const [title, unit, names] of PANELS) if (hasAny(names)) grid.append(new Chart(title, unit, { view, series: linesOf(names, view) }).node);
  const search = el("input", { type: "search", placeholder: "Filter metrics", "aria-label": "Filter metrics", oninput: () => fill() });
  const list = el("div", { class: "list" });
  function fill() {
    const words = search.value.toLowerCase();
    list.replaceChildren(...metrics.filter((name) => name.toLowerCase().includes(words)).map((name) => {
      const box = el("input", { type: "checkbox", checked: added.has(name), onchange: () => toggle(name, box.checked) });
      return el("label", {}, box, name);
    }));
  }
  function toggle(name, isOn) {
    if (!isOn) {
      view.charts.delete(added.get(name));
      added.get(name)?.node.remove();
      added.delete(name);
    } else if (!added.has(name)) {
      const chart = new Chart(name, "", { view, series: linesOf([name], view) });
      chart.header.append(el("button", { type: "button", class: "remove", "aria-label": `Remove ${name}`, onclick: () => { toggle(name, false); fill(); } }, "×"));
      added.set(name, chart);
      grid.prepend(chart.node);
    }
  }
  fill();
  const pickerBody = el("div", { class: "card picker-body hidden", id: "metrics" }, search, list);
  const picker = el("button", { type: "button", "aria-expanded": "false", "aria-controls": "metrics", onclick: () => {
    const isHidden = pickerBody.classList.toggle("hidden");
    picker.setAttribute("aria-expanded", String(!isHidden));
  } }, `Add metrics (${metrics.length})`);
  section.append(el("div", { class: "controls" }, ...viewControls(view), picker), pickerBody, grid);
  redraws.theme.push(() => view.draw());
  redraws.runs.push(() => view.draw());
  if (report.runs.some((run) => run.curves?.groups.some((group) => group.low))) {
    section.append(el("p", { class: "note" }, `Long curves have at most ${whole.format(1500)} points. A point is the mean of several steps, and the band around the line is their range.`));
  }
  return section;
}

function rewardsSection() {
  const metrics = metricsOf(report.runs);
  const names = metrics.filter((name) => /^rewards\/[^/]+$/.test(name)).map((name) => name.slice(8));
  if (!names.length && !metrics.includes("reward")) return null;
  const section = makeSection("rewards", "Rewards by name", "Mean score of each reward before its weight, and the time and failures of its calls.");
  if (!names.length) return withNote(section, null, "These runs log only the total reward.");
  const view = new View();
  view.axis = "step";
  const short = (metric) => metric.split("/")[1];
  const panel = (title, unit, suffix) => {
    const own = names.map((name) => `rewards/${name}${suffix}`);
    return hasAny(own) ? new Chart(title, unit, { view, series: linesOf(own, view, short) }).node : null;
  };
  const grid = el("div", { class: "grid" });
  grid.append(...[panel("Score", "before the weight", ""), panel("Duration of a call", "seconds", "/seconds"), panel("Failed calls", "fraction", "/failed_fraction")].filter(Boolean));
  section.append(el("div", { class: "controls" }, ...viewControls(view)), grid, rewardTable(names));
  redraws.theme.push(() => view.draw());
  redraws.runs.push(() => view.draw());
  return section;
}

function rewardTable(names) {
  const rows = report.runs.flatMap((run) => names.flatMap((name) => {
    const points = pointsOf(run, `rewards/${name}`, "step");
    if (!points) return [];
    const tenth = Math.max(1, Math.floor(points.y.length / 10));
    const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
    const [first, last] = [mean(points.y.slice(0, tenth)), mean(points.y.slice(-tenth))];
    return [el("tr", {}, report.runs.length > 1 ? el("td", {}, runLabel(run)) : null, el("th", { scope: "row" }, name),
      el("td", { class: "num" }, formatNumber(first)), el("td", { class: "num" }, formatNumber(last)), el("td", { class: "num" }, signed(last - first)))];
  }));
  return el("div", { class: "card pad scroll" }, el("table", {}, el("thead", {}, el("tr", {},
    report.runs.length > 1 ? el("th", {}, "Run") : null, el("th", {}, "Reward"), el("th", { class: "num" }, "First 10 %"), el("th", { class: "num" }, "Last 10 %"), el("th", { class: "num" }, "Change"))),
  el("tbody", {}, ...rows)));
}

const signed = (value) => `${value >= 0 ? "+" : "−"}${formatNumber(Math.abs(value))}`;

function stalenessSection() {
  const section = makeSection("staleness", "Staleness and buffer", "Age of the responses in weight versions, groups in the buffer, and waits.");
  if (!hasAny(["staleness"])) {
    const kinds = [...new Set(report.runs.map((run) => run.schedule?.kind ?? null))].filter(Boolean);
    const why = kinds.length ? `With schedule ${kinds.join(" and ")}, every response is sampled by the newest weights.` : "These runs have no schedule of rollouts.";
    return withNote(section, null, why);
  }
  const view = new View();
  view.axis = "step";
  const grid = el("div", { class: "grid" });
  for (const [title, unit, all] of STALENESS_PANELS) {
    // Most runs drop no group, or only for one of the reasons.
    const names = title === "Dropped groups" ? all.filter((name) => report.runs.some((run) => pointsOf(run, name, "step")?.y.some((value) => value))) : all;
    if (hasAny(names)) grid.append(new Chart(title, unit, { view, series: linesOf(names, view) }).node);
  }
  for (const run of report.runs) {
    const shares = metricsOf([run]).filter((name) => /^staleness_\d+$/.test(name)).sort((a, b) => a.slice(10) - b.slice(10));
    if (shares.length) {
      const label = report.runs.length > 1 ? `Responses by staleness, ${run.name}` : "Responses by staleness";
      const series = () => shares.map((name, i) => ({ ...pointsOf(run, name, "step"), name: `${name.slice(10)}`, color: [0, 5, 4, 1, 3, 6, 2, 7][i % 8] }));
      const own = view.axis === "step" ? view : new View();
      grid.append(new Chart(label, "fraction", { view: own, series: alignedSeries(series), isStacked: true }).node);
    }
  }
  section.append(el("div", { class: "controls" }, ...viewControls(view)), grid);
  redraws.theme.push(() => view.draw());
  redraws.runs.push(() => view.draw());
  return section;
}

/** Gives all lines the x values of the longest line, because stacked values need the same steps. */
function alignedSeries(series) {
  return () => {
    const lines = series().filter((line) => line.x);
    const longest = lines.reduce((a, b) => (b.x.length > a.x.length ? b : a), lines[0]);
    return lines.map((line) => {
      if (line.x === longest.x || line.x.length === longest.x.length) return { ...line, x: longest.x };
      const byX = new Map(line.x.map((x, i) => [x, line.y[i]]));
      return { ...line, x: longest.x, y: longest.x.map((x) => byX.get(x) ?? 0) };
    });
  };
}
