// Zoomable timeline of calls per rank, and tables of where the time went.

const ROW_HEIGHT = 30;
const AXIS_HEIGHT = 24;

/** Adds absolute starts, the color of each method, and the calls of each row to the data of a timeline. */
function prepareTimeline(data) {
  const { calls } = data;
  let start = 0;
  calls.at = calls.start.map((gap) => (start += gap));
  data.byRow = data.rows.map(() => []);
  calls.row.forEach((row, i) => data.byRow[row].push(i));
  // The method of a role with the longest total time has the color of the role, and the others are paler.
  const spent = data.methods.map(() => 0);
  calls.method.forEach((method, i) => (spent[method] += calls.duration[i]));
  data.spent = spent;
  data.methodRole = data.methods.map((name) => name.split(".")[0]);
  data.methodShade = data.methodRole.map((role, i) =>
    data.methodRole.filter((other, k) => other === role && (spent[k] > spent[i] || (spent[k] === spent[i] && k < i))).length);
  return data;
}

function methodColor(data, method) {
  const shade = data.methodShade[method] % 4;
  return mix(roleColor(data.methodRole[method]), isDark() ? "#0d1117" : "#ffffff", shade * 0.22);
}

class Timeline {
  constructor(data) {
    this.data = data;
    this.selected = null;
    this.hidden = new Set();
    this.from = 0;
    this.to = data.duration_us;
    this.canvas = el("canvas", { tabindex: "0", role: "img" });
    this.canvas.style.height = `${AXIS_HEIGHT + ROW_HEIGHT * data.rows.length + 18}px`;
    this.overview = el("canvas", { class: "overview", "aria-hidden": "true" });
    this.status = el("div", { class: "status", "aria-live": "polite" });
    const zoom = (factor) => () => this.zoom(factor);
    this.node = el("div", { class: "card pad stack timeline" },
      el("div", { class: "controls" },
        el("div", { class: "segments", role: "group", "aria-label": "Zoom of the timeline" },
          el("button", { type: "button", "aria-label": "Zoom in", onclick: zoom(0.5) }, "+"),
          el("button", { type: "button", "aria-label": "Zoom out", onclick: zoom(2) }, "−"),
          el("button", { type: "button", "aria-label": "Earlier", onclick: () => this.pan(-0.5) }, "←"),
          el("button", { type: "button", "aria-label": "Later", onclick: () => this.pan(0.5) }, "→"),
          el("button", { type: "button", onclick: () => this.show(0, data.duration_us) }, "Show all")),
        this.window = el("span", { class: "note mono" })),
      this.overview, this.canvas, this.status, this.makeLegend());
    this.listen();
    this.fitStart();
  }

  /** Shows the last calls, because all calls of a run would be thinner than a pixel. */
  fitStart() {
    const { at } = this.data.calls;
    const first = at[Math.max(0, at.length - 40 * this.data.rows.length)];
    this.from = first > 0.5 * this.data.duration_us ? first : 0;
    this.describe(null);
  }

  makeLegend() {
    // Methods that take little time have no entry, because a run has about twenty of them.
    const most = this.data.methods.map((_, method) => method).sort((a, b) => this.data.spent[b] - this.data.spent[a]).slice(0, 10);
    const chips = most.map((method) => {
      const name = this.data.methods[method];
      const swatch = el("i", { class: "swatch square" });
      const paint = () => { swatch.style.background = methodColor(this.data, method); };
      paint();
      redraws.theme.push(paint);
      const chip = el("button", { type: "button", class: "chip", "aria-pressed": "true", onclick: () => {
        if (this.hidden.has(method)) this.hidden.delete(method);
        else this.hidden.add(method);
        chip.setAttribute("aria-pressed", String(!this.hidden.has(method)));
        this.draw();
      } }, swatch, name);
      return chip;
    });
    const path = el("span", { class: "chip" }, el("i", { class: "swatch", style: { background: "currentColor" } }), "critical path");
    return el("div", { class: "controls", style: { gap: "6px" } }, ...chips, path);
  }

  listen() {
    const canvas = this.canvas;
    const pointers = new Map();
    canvas.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, event.clientX);
      canvas.setPointerCapture(event.pointerId);
      this.moved = 0;
      canvas.classList.add("dragging");
    });
    canvas.addEventListener("pointermove", (event) => {
      if (pointers.has(event.pointerId)) {
        const before = [...pointers.values()];
        const delta = event.clientX - pointers.get(event.pointerId);
        pointers.set(event.pointerId, event.clientX);
        const after = [...pointers.values()];
        this.moved += Math.abs(delta);
        if (after.length === 2) this.zoom(Math.abs(before[0] - before[1]) / Math.max(1, Math.abs(after[0] - after[1])), (after[0] + after[1]) / 2);
        else this.pan(-delta / this.plotWidth);
      } else if (event.pointerType === "mouse") this.describe(this.callAt(event));
    });
    const release = (event) => {
      pointers.delete(event.pointerId);
      canvas.classList.remove("dragging");
    };
    canvas.addEventListener("pointerup", (event) => {
      release(event);
      if (this.moved < 5) this.describe(this.callAt(event));
    });
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, event.clientX));
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(event.deltaY / 200), event.clientX);
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan((event.deltaX || event.deltaY) / this.plotWidth);
      else return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    const jump = (event) => {
      if (event.type === "pointermove" && !event.buttons) return;
      const box = this.overview.getBoundingClientRect();
      const middle = ((event.clientX - box.left - this.left) / this.plotWidth) * this.data.duration_us;
      const half = (this.to - this.from) / 2;
      this.show(middle - half, middle + half);
    };
    this.overview.addEventListener("pointerdown", jump);
    this.overview.addEventListener("pointermove", jump);
    this.drawing = new Drawing(canvas, () => this.paint());
    redraws.theme.push(() => this.draw());
  }

  onKey(event) {
    const { calls, byRow } = this.data;
    const step = (offset) => {
      if (this.selected === null) {
        const i = calls.at.findIndex((at, call) => at + calls.duration[call] >= this.from);
        return this.select(Math.max(0, i));
      }
      const own = byRow[calls.row[this.selected]];
      this.select(own[own.indexOf(this.selected) + offset] ?? this.selected);
    };
    const row = (offset) => {
      if (this.selected === null) return step(0);
      const other = byRow[calls.row[this.selected] + offset];
      if (!other) return;
      const at = calls.at[this.selected];
      this.select(other.reduce((a, b) => (Math.abs(calls.at[b] - at) < Math.abs(calls.at[a] - at) ? b : a), other[0]));
    };
    const keys = {
      ArrowRight: () => step(1), ArrowLeft: () => step(-1), ArrowDown: () => row(1), ArrowUp: () => row(-1),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.show(0, this.data.duration_us),
    };
    if (!keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
  }

  select(call) {
    const { calls } = this.data;
    const [start, end] = [calls.at[call], calls.at[call] + calls.duration[call]];
    const width = this.to - this.from;
    if (start < this.from) this.show(start - 0.2 * width, start + 0.8 * width);
    if (end > this.to) this.show(end - 0.8 * width, end + 0.2 * width);
    this.describe(call);
  }

  zoom(factor, clientX) {
    const share = clientX === undefined ? 0.5 : (clientX - this.canvas.getBoundingClientRect().left - this.left) / this.plotWidth;
    const at = this.from + Math.min(1, Math.max(0, share)) * (this.to - this.from);
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  pan(share) {
    const by = share * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  show(from, to) {
    const length = Math.min(this.data.duration_us, Math.max(20, to - from));
    this.from = Math.min(Math.max(0, from), this.data.duration_us - length);
    this.to = this.from + length;
    this.draw();
  }

  get plotWidth() {
    return Math.max(10, this.canvas.clientWidth - this.left - 2);
  }

  callAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - AXIS_HEIGHT) / ROW_HEIGHT);
    const own = this.data.byRow[row];
    if (!own || event.clientX - box.left < this.left) return null;
    const { at, duration, method } = this.data.calls;
    const unit = (this.to - this.from) / this.plotWidth;
    const time = this.from + (event.clientX - box.left - this.left) * unit;
    const hit = own.filter((i) => at[i] - 3 * unit <= time && time <= at[i] + duration[i] + 3 * unit && !this.hidden.has(method[i]));
    const distance = (i) => Math.max(0, at[i] - time, time - at[i] - duration[i]);
    return hit.length ? hit.reduce((a, b) => (distance(b) < distance(a) ? b : a)) : null;
  }

  describe(call) {
    if (call !== null || this.selected === null) {
      const { calls, rows, methods } = this.data;
      if (call === null) {
        this.status.replaceChildren("Select a call to see its times. Drag or use the arrow buttons to move, + and − or Ctrl and the wheel to zoom.");
      } else {
        const row = rows[calls.row[call]];
        const us = (name) => formatSeconds(calls[name][call] / 1e6);
        this.status.replaceChildren(el("b", {}, methods[calls.method[call]]), ` on rank ${row.rank} (${row.device}, pool ${row.pool}) at `,
          el("b", {}, formatSeconds(calls.at[call] / 1e6)), ": compute ", el("b", {}, us("duration")), `, wait ${us("wait")}, queue ${us("queue")}, transfer ${us("transfer")}`);
      }
    }
    this.selected = call;
    this.draw();
  }

  draw() {
    this.drawing.changed();
  }

  context(canvas) {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(canvas.clientHeight * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, 'DejaVu Sans', sans-serif";
    context.textBaseline = "middle";
    return context;
  }

  paint() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const isNarrow = width < 560;
    this.left = isNarrow ? 84 : 190;
    const context = this.context(this.canvas);
    const { data, from, to } = this;
    const px = (us) => this.left + ((us - from) / (to - from)) * this.plotWidth;
    this.paintAxis(context, px);
    const [text, muted, line] = ["--text", "--muted", "--line"].map(cssColor);
    data.rows.forEach((row, i) => {
      const top = AXIS_HEIGHT + i * ROW_HEIGHT;
      context.fillStyle = line;
      context.fillRect(0, top, width, 1);
      context.textAlign = "left";
      context.fillStyle = text;
      context.fillText(`${row.role} ${row.rank}`, 0, top + ROW_HEIGHT / 2 - (isNarrow ? 0 : 0), isNarrow ? 80 : 86);
      if (!isNarrow) {
        context.fillStyle = muted;
        context.fillText(`${row.pool} ${row.device.replace(/^node/, "")}`, 92, top + ROW_HEIGHT / 2, 94);
      }
      this.paintCalls(context, data.byRow[i], top, px);
    });
    this.paintPath(context, px, text);
    this.paintOverview();
    this.window.textContent = `${formatSeconds(from / 1e6)} to ${formatSeconds(to / 1e6)} of ${formatSeconds(data.duration_us / 1e6)}`;
    this.canvas.setAttribute("aria-label", `Timeline of ${plural(data.calls.at.length, "call")} on ${plural(data.rows.length, "rank")}. Arrow keys select calls, plus and minus zoom. The tables below have the totals.`);
  }

  paintAxis(context, px) {
    const [muted, line] = ["--muted", "--line"].map(cssColor);
    const { ticks, spacing } = linearTicks(this.from / 1e6, this.to / 1e6, Math.max(2, Math.floor(this.plotWidth / 110)));
    context.textAlign = "center";
    const bottom = AXIS_HEIGHT + ROW_HEIGHT * this.data.rows.length;
    for (const tick of ticks) {
      const at = px(tick * 1e6);
      context.fillStyle = line;
      context.fillRect(Math.round(at), AXIS_HEIGHT - 5, 1, bottom - AXIS_HEIGHT + 5);
      const label = spacing < 1e-3 ? `${(tick * 1e3).toFixed(3)} ms` : `${formatTick(tick, spacing)} s`;
      const half = context.measureText(label).width / 2;
      context.fillStyle = muted;
      if (at - half > this.left - 30 && at + half < this.left + this.plotWidth + 2) context.fillText(label, at, 9);
    }
  }

  paintCalls(context, own, top, px) {
    const { at, duration, method } = this.data.calls;
    const { from, to, hidden } = this;
    // Calls of a rank do not overlap, so their ends are in ascending order, too.
    let low = 0;
    let high = own.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (at[own[middle]] + duration[own[middle]] < from) low = middle + 1;
      else high = middle;
    }
    let lastX = -1;
    for (let k = low; k < own.length && at[own[k]] <= to; k++) {
      const i = own[k];
      if (hidden.has(method[i])) continue;
      const x = Math.max(this.left, px(at[i]));
      const end = Math.min(this.left + this.plotWidth, px(at[i] + duration[i]));
      if (end - x < 0.5 && Math.floor(x) === lastX) continue;
      lastX = Math.floor(x);
      const w = Math.max(1, end - x - (end - x > 4 ? 1 : 0));
      const color = methodColor(this.data, method[i]);
      context.fillStyle = color;
      context.fillRect(x, top + 6, w, ROW_HEIGHT - 13);
      if (i === this.selected) {
        context.strokeStyle = cssColor("--text");
        context.lineWidth = 2;
        context.strokeRect(x - 1, top + 5, w + 2, ROW_HEIGHT - 11);
      }
      const label = this.data.methods[method[i]].split(".")[1];
      if (w > 30 && context.measureText(label).width < w - 8) {
        context.fillStyle = luminance(color) > 0.36 ? "#10151c" : "#ffffff";
        context.textAlign = "left";
        context.fillText(label, x + 4, top + ROW_HEIGHT / 2);
      }
    }
  }

  paintPath(context, px, color) {
    const { path } = this.data;
    context.fillStyle = color;
    path.start.forEach((start, i) => {
      if (path.row[i] < 0 || start > this.to || start + path.duration[i] < this.from) return;
      const x = Math.max(this.left, px(start));
      const end = Math.min(this.left + this.plotWidth, px(start + path.duration[i]));
      context.fillRect(x, AXIS_HEIGHT + path.row[i] * ROW_HEIGHT + ROW_HEIGHT - 5, Math.max(1, end - x), 3);
    });
  }

  paintOverview() {
    const context = this.context(this.overview);
    const height = this.overview.clientHeight;
    const width = this.plotWidth;
    const { calls, rows, duration_us: total } = this.data;
    if (!this.density || this.density.length !== Math.floor(width)) {
      const density = new Float32Array(Math.floor(width));
      calls.at.forEach((at, i) => {
        const first = (at / total) * width;
        const last = ((at + calls.duration[i]) / total) * width;
        for (let x = Math.floor(first); x <= last && x < density.length; x++) density[x] += Math.min(x + 1, last) - Math.max(x, first);
      });
      this.density = density;
    }
    context.fillStyle = cssColor("--sunken");
    context.fillRect(this.left, 0, width, height);
    context.fillStyle = cssColor("--muted");
    this.density.forEach((busy, x) => {
      const bar = Math.min(1, busy / rows.length) * (height - 4);
      context.fillRect(this.left + x, height - bar, 1, bar);
    });
    context.textAlign = "left";
    if (this.left > 100) context.fillText("busy ranks", 0, height / 2);
    else context.fillText("busy", 0, height / 2);
    const [from, to] = [this.from, this.to].map((us) => this.left + (us / total) * width);
    context.globalAlpha = 0.22;
    context.fillStyle = cssColor("--accent");
    context.fillRect(from, 0, Math.max(3, to - from), height);
    context.globalAlpha = 1;
    context.strokeStyle = cssColor("--accent");
    context.lineWidth = 2;
    context.strokeRect(from + 1, 1, Math.max(3, to - from - 2), height - 2);
  }
}

function luminance(color) {
  const [r, g, b] = [1, 3, 5].map((i) => (parseInt(color.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function median(values) {
  const sorted = Float64Array.from(values).sort();
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** Table of methods: number of calls, and median and total of each part of a call. */
function methodTable(data) {
  const { calls, methods } = data;
  const own = methods.map(() => []);
  calls.method.forEach((method, i) => own[method].push(i));
  const total = (list, name) => list.reduce((sum, i) => sum + calls[name][i], 0);
  const order = methods.map((_, method) => method).sort((a, b) => total(own[b], "duration") - total(own[a], "duration"));
  const seconds = (us) => formatSeconds(us / 1e6);
  const rows = order.map((method) => el("tr", {}, el("th", { scope: "row" }, methods[method]),
    el("td", { class: "num" }, whole.format(own[method].length)),
    el("td", { class: "num" }, seconds(median(own[method].map((i) => calls.duration[i])))),
    ...["duration", "wait", "queue", "transfer"].map((name) => el("td", { class: "num" }, seconds(total(own[method], name))))));
  const heads = ["Calls", "Median", "Compute", "Wait", "Queue", "Transfer"].map((name) => el("th", { class: "num" }, name));
  return el("div", { class: "card pad scroll" }, el("h3", {}, "Time per method"),
    el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, ""), ...heads)), el("tbody", {}, ...rows)));
}

function pathTable(data) {
  const rows = data.totals.filter(({ share }) => share >= 0.0005).map(({ call, part, seconds, share }) => el("tr", {},
    el("th", { scope: "row" }, part === "driver" ? `driver, before ${call}` : part === "transfer" ? `transfer of ${call}` : call),
    el("td", { class: "num" }, formatSeconds(seconds)), el("td", { class: "num" }, percent(share))));
  return el("div", { class: "card pad scroll" }, el("h3", {}, "Critical path"),
    el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, ""), el("th", { class: "num" }, "Time"), el("th", { class: "num" }, "Share"))), el("tbody", {}, ...rows)));
}

/** Plots the numbers of groups per state over the time of the timeline. */
function countsPanel(data) {
  const { at_s: x, ...states } = data.counts;
  if (!x) return null;
  const view = new View();
  view.xLabel = "time since the start of the timeline (seconds)";
  view.xName = "time";
  view.describeX = formatSeconds;
  const names = Object.keys(states);
  redraws.theme.push(() => view.draw());
  return new Chart("Groups per state", "prompts", { view, series: () => names.map((name, i) => ({ name, x, y: states[name], color: i })) }).node;
}

function timelineSection() {
  const section = makeSection("timeline", "Timeline", "Calls of the workers, one line per rank.");
  const body = el("div", { class: "stack" });
  const runs = report.runs.filter((run) => !run.missing.timeline);
  section.append(body);
  async function show(run) {
    const isFirst = !run.timeline;
    run.timeline ??= prepareTimeline(await readPart(`timeline-${run.index}`));
    if (isFirst) run.timelineNodes = timelineNodes(run.timeline);
    body.replaceChildren(...run.timelineNodes);
  }
  if (runs.length > 1) section.insertBefore(runSelect(runs, show), body);
  if (runs.length) loaders.push(() => show(runs[0]));
  for (const run of report.runs) if (run.missing.timeline) section.append(missingNote(run, "timeline"));
  return section;
}

function timelineNodes(data) {
  const notes = [data.bottleneck];
  if (data.is_partial) notes.push("Earlier calls are not in the trace.");
  if (data.is_resumed) notes.push("Calls before the last resume are not shown.");
  const counts = countsPanel(data);
  return [
    el("p", { class: "note" }, notes.join(" ")),
    new Timeline(data).node,
    counts,
    el("div", { class: "pair tables" }, methodTable(data), pathTable(data)),
  ].filter(Boolean);
}
