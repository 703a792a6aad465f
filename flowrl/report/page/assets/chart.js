// Line charts on a canvas, with envelopes, smoothing, logarithmic scale, crosshair and zoom.

const smoothed = (values, factor) => {
  if (!factor) return values;
  let mean = 0;
  let weight = 0;
  return values.map((value) => {
    mean = factor * mean + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return mean / weight;
  });
};

/** Returns ticks at 1, 2 or 5 times a power of ten. */
function linearTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const spacing = [1, 2, 5, 10].map((k) => k * power).find((step) => step >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / spacing - 1e-9); i * spacing <= high * (1 + 1e-12) + spacing * 1e-9; i++) ticks.push(i * spacing);
  return { ticks, spacing };
}

function logTicks(low, high) {
  const ticks = [];
  const steps = Math.log10(high / low) < 2 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const k of steps) if (k * 10 ** power >= low * 0.999 && k * 10 ** power <= high * 1.001) ticks.push(k * 10 ** power);
  }
  const every = Math.ceil(ticks.length / 6);
  return ticks.filter((_, i) => i % every === 0);
}

/** Index of the x value nearest to x, in ascending xs. */
function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

class Chart {
  /**
   * options: series (name, color index, dash index, x, y, low, high), view (shared: x range, crosshair, smoothing,
   * isLog), xLabel, formatX, isStacked, height.
   */
  constructor(title, unit, options) {
    this.options = options;
    this.view = options.view;
    this.legend = el("div", { class: "legend" });
    this.canvas = el("canvas", { class: "plot", tabindex: "0", role: "img" });
    this.header = el("header", {}, el("h3", {}, title, unit ? el("span", { class: "unit" }, `  ${unit}`) : null));
    this.node = el("div", { class: "card panel" }, this.header, this.legend, this.canvas);
    this.title = title;
    this.view.charts.add(this);
    this.canvas.addEventListener("pointermove", (event) => this.onMove(event));
    this.canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    this.canvas.addEventListener("pointerup", (event) => this.onUp(event));
    this.canvas.addEventListener("pointercancel", () => { this.dragStart = null; this.view.setCrosshair(null); });
    this.canvas.addEventListener("pointerleave", () => { if (this.dragStart == null) this.view.setCrosshair(null); });
    this.canvas.addEventListener("dblclick", () => this.view.setRange(null));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.canvas.addEventListener("blur", () => this.view.setCrosshair(null));
    this.drawing = new Drawing(this.canvas, () => this.draw());
  }

  get series() {
    return this.options.series().filter((line) => line.x && line.x.length);
  }

  xAt(clientX) {
    const [x0, x1] = this.range;
    const { left, width } = this.box;
    const share = (clientX - this.canvas.getBoundingClientRect().left - left) / width;
    return x0 + Math.min(1, Math.max(0, share)) * (x1 - x0);
  }

  onMove(event) {
    if (!this.box) return;
    if (this.dragStart != null) this.dragEnd = this.xAt(event.clientX);
    this.view.setCrosshair(this.xAt(event.clientX));
  }

  onDown(event) {
    if (!this.box) return;
    if (event.pointerType === "touch") this.view.setCrosshair(this.xAt(event.clientX));
    else if (event.button === 0) {
      this.canvas.setPointerCapture(event.pointerId);
      this.dragStart = this.dragEnd = this.xAt(event.clientX);
    }
  }

  onUp() {
    if (this.dragStart == null) return;
    const [from, to] = [this.dragStart, this.dragEnd].sort((a, b) => a - b);
    this.dragStart = null;
    if (to - from > (this.range[1] - this.range[0]) / 100) this.view.setRange([from, to]);
    else this.view.draw();
  }

  onKey(event) {
    const lines = this.series;
    if (!lines.length || !this.box) return;
    const [x0, x1] = this.range;
    const xs = lines[0].x;
    const at = this.view.crosshair ?? x1;
    const keys = {
      ArrowLeft: () => this.view.setCrosshair(xs[Math.max(0, nearest(xs, at) - 1)]),
      ArrowRight: () => this.view.setCrosshair(xs[Math.min(xs.length - 1, nearest(xs, at) + 1)]),
      "+": () => this.view.setRange([at - (at - x0) / 2, at + (x1 - at) / 2]),
      "-": () => this.view.setRange([x0 - (x1 - x0) / 2, x1 + (x1 - x0) / 2]),
      0: () => this.view.setRange(null),
      Escape: () => this.view.setRange(null),
    };
    const action = keys[event.key === "=" ? "+" : event.key];
    if (action) {
      action();
      event.preventDefault();
    }
  }

  /** Returns the lines in the visible range, with smoothed values, and the limits of both axes. */
  layout(lines) {
    const full = [Math.min(...lines.map((l) => l.x[0])), Math.max(...lines.map((l) => l.x[l.x.length - 1]))];
    if (full[0] === full[1]) full[1] = full[0] + 1;
    const range = this.view.range ? [Math.max(full[0], this.view.range[0]), Math.min(full[1], this.view.range[1])] : full;
    this.range = range[0] < range[1] ? range : full;
    const shown = lines.map((line) => {
      const from = Math.max(0, nearest(line.x, this.range[0]) - 1);
      const to = Math.min(line.x.length, nearest(line.x, this.range[1]) + 2);
      const y = smoothed(line.y, this.options.isStacked ? 0 : this.view.smoothing);
      const cut = (values) => values && values.slice(from, to);
      return { ...line, all: y, x: cut(line.x), y: cut(y), raw: cut(line.y), low: cut(line.low), high: cut(line.high) };
    });
    if (this.options.isStacked) stack(shown);
    const isLog = this.view.isLog && !this.options.isStacked;
    const values = shown.flatMap((l) => [...l.y, ...l.raw]).concat(
      this.view.smoothing > 0.5 ? [] : shown.flatMap((l) => [...(l.low || []), ...(l.high || [])]),
    ).filter((value) => Number.isFinite(value) && (!isLog || value > 0));
    let low = values.reduce((a, b) => Math.min(a, b), Infinity);
    let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (low === Infinity) [low, high] = isLog ? [0.1, 1] : [0, 1];
    if (this.options.isStacked) low = 0;
    if (!isLog && low > 0 && low < 0.35 * high) low = 0;
    if (low === 0 && high === 0) high = 1;
    if (low === high) [low, high] = isLog ? [low / 2, low * 2] : [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
    const pad = isLog ? 0 : (high - low) * 0.05;
    this.limits = [low === 0 || (low > 0 && low - pad < 0) ? Math.min(low, 0) : low - pad, high + pad];
    if (isLog) this.limits = [low * 0.9, high * 1.1];
    return { shown, isLog };
  }

  draw() {
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight;
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const lines = this.series;
    if (!lines.length) {
      this.box = null;
      this.legend.replaceChildren("no values in the selected runs");
      return;
    }
    const { shown, isLog } = this.layout(lines);
    this.drawAxes(context, width, height, isLog);
    const { left, top, width: w, height: h } = this.box;
    const [x0, x1] = this.range;
    const [y0, y1] = this.limits;
    const px = (x) => left + ((x - x0) / (x1 - x0)) * w;
    const py = isLog
      ? (y) => (y > 0 ? top + h - (Math.log(y / y0) / Math.log(y1 / y0)) * h : NaN)
      : (y) => top + h - ((y - y0) / (y1 - y0)) * h;
    context.save();
    context.beginPath();
    context.rect(left, top - 2, w, h + 4);
    context.clip();
    for (const line of shown) this.drawLine(context, line, px, py);
    context.restore();
    this.drawCrosshair(context, shown, px, py);
    this.showValues(shown);
  }

  drawAxes(context, width, height, isLog) {
    const [y0, y1] = this.limits;
    context.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, 'DejaVu Sans', sans-serif";
    const y = isLog ? { ticks: logTicks(y0, y1), spacing: null } : linearTicks(y0, y1, 5);
    const labels = y.ticks.map((tick) => formatTick(tick, y.spacing ?? tick));
    const left = Math.ceil(Math.max(24, ...labels.map((label) => context.measureText(label).width))) + 8;
    this.box = { left, top: 8, width: width - left - 10, height: height - 8 - 36 };
    const { top, width: w, height: h } = this.box;
    const line = cssColor("--line");
    context.fillStyle = cssColor("--muted");
    context.strokeStyle = line;
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    y.ticks.forEach((tick, i) => {
      const share = isLog ? Math.log(tick / y0) / Math.log(y1 / y0) : (tick - y0) / (y1 - y0);
      const at = Math.round(top + h - share * h) + 0.5;
      context.beginPath();
      context.moveTo(left, at);
      context.lineTo(left + w, at);
      context.stroke();
      context.fillText(labels[i], left - 6, at);
    });
    const [x0, x1] = this.range;
    const x = linearTicks(x0, x1, Math.max(2, Math.floor(w / 62)));
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const tick of x.ticks) {
      const at = left + ((tick - x0) / (x1 - x0)) * w;
      context.beginPath();
      context.moveTo(at, top + h);
      context.lineTo(at, top + h + 4);
      context.stroke();
      const label = this.view.formatX ? this.view.formatX(tick, x.spacing) : formatTick(tick, x.spacing);
      const half = context.measureText(label).width / 2;
      context.fillText(label, Math.min(left + w + 8 - half, Math.max(left - 4 + half, at)), top + h + 6);
    }
    context.fillText(this.options.xLabel ?? this.view.xLabel, left + w / 2, top + h + 21);
  }

  drawLine(context, line, px, py) {
    const color = paletteColor(line.color);
    const path = (values) => {
      context.beginPath();
      let isOpen = false;
      values.forEach((value, i) => {
        const at = py(value);
        if (!Number.isFinite(at)) isOpen = false;
        else if (isOpen) context.lineTo(px(line.x[i]), at);
        else {
          context.moveTo(px(line.x[i]), at);
          isOpen = true;
        }
      });
    };
    context.fillStyle = context.strokeStyle = color;
    if (this.options.isStacked) {
      path(line.y);
      for (let i = line.x.length - 1; i >= 0; i--) context.lineTo(px(line.x[i]), py(line.base[i]));
      context.globalAlpha = 0.85;
      context.fill();
      context.globalAlpha = 1;
      return;
    }
    if (line.low) {
      path(line.high);
      for (let i = line.x.length - 1; i >= 0; i--) context.lineTo(px(line.x[i]), Math.min(1e6, py(line.low[i]) || 1e6));
      context.globalAlpha = 0.16;
      context.fill();
      context.globalAlpha = 1;
    }
    context.lineJoin = "round";
    if (this.view.smoothing) {
      path(line.raw);
      context.globalAlpha = 0.22;
      context.lineWidth = 1;
      context.stroke();
      context.globalAlpha = 1;
    }
    path(line.y);
    context.lineWidth = 1.75;
    context.setLineDash(DASHES[(line.dash || 0) % DASHES.length]);
    context.stroke();
    context.setLineDash([]);
    if (line.x.length <= 25) {
      line.x.forEach((x, i) => {
        context.beginPath();
        context.arc(px(x), py(line.y[i]), 3, 0, 7);
        context.fill();
      });
    }
  }

  drawCrosshair(context, shown, px, py) {
    const { left, top, width: w, height: h } = this.box;
    if (this.dragStart != null) {
      const [from, to] = [px(this.dragStart), px(this.dragEnd)].sort((a, b) => a - b);
      context.globalAlpha = 0.12;
      context.fillStyle = cssColor("--accent");
      context.fillRect(from, top, to - from, h);
      context.globalAlpha = 1;
    }
    const at = this.view.crosshair;
    if (at == null || at < this.range[0] || at > this.range[1]) return;
    context.strokeStyle = cssColor("--muted");
    context.beginPath();
    context.moveTo(Math.round(px(at)) + 0.5, top);
    context.lineTo(Math.round(px(at)) + 0.5, top + h);
    context.stroke();
    for (const line of shown) {
      const i = nearest(line.x, at);
      const y = py(line.y[i]);
      if (!Number.isFinite(y) || px(line.x[i]) < left - 1 || px(line.x[i]) > left + w + 1) continue;
      context.fillStyle = paletteColor(line.color);
      context.beginPath();
      context.arc(px(line.x[i]), y, 3.5, 0, 7);
      context.fill();
    }
  }

  showValues(shown) {
    const at = this.view.crosshair;
    const isHovering = at != null && at >= this.range[0] && at <= this.range[1];
    const entries = shown.map((line) => {
      const i = isHovering ? nearest(line.x, at) : line.x.length - 1;
      const value = this.options.isStacked ? line.y[i] - line.base[i] : line.y[i];
      const range = isHovering && line.low ? ` (${formatNumber(line.low[i])} to ${formatNumber(line.high[i])})` : "";
      const swatch = el("i", { class: this.options.isStacked ? "swatch square" : "swatch", style: { background: dashed(line) } });
      return el("span", {}, swatch, el("span", { class: "name", title: line.name }, line.name), el("b", {}, formatNumber(value) + range));
    });
    if (isHovering) {
      const x = shown[0].x[nearest(shown[0].x, at)];
      entries.unshift(el("span", {}, `${this.view.xName} `, el("b", {}, this.view.describeX ? this.view.describeX(x) : formatNumber(Math.round(x * 1e3) / 1e3))));
    }
    this.legend.replaceChildren(...entries);
    const texts = shown.map((line) => `${line.name}: last ${formatNumber(line.all[line.all.length - 1])}`);
    this.canvas.setAttribute("aria-label", `${this.title}. ${texts.join("; ")}. Arrow keys read values, plus and minus zoom.`);
  }
}

/** Background of a swatch that shows the color and the dash pattern of a line. */
function dashed(line) {
  const color = paletteColor(line.color);
  const [on, off] = DASHES[(line.dash || 0) % DASHES.length];
  return on ? `repeating-linear-gradient(90deg, ${color} 0 ${on}px, transparent ${on}px ${on + off}px)` : color;
}

/** Replaces the values of lines by sums, from the first line up. `base` is the lower end of a line. */
function stack(lines) {
  let base = lines[0].x.map(() => 0);
  for (const line of lines) {
    line.base = base;
    line.y = line.raw = line.y.map((value, i) => value + base[i]);
    line.low = line.high = null;
    base = line.y;
  }
}

/** State that several charts share. */
class View {
  constructor() {
    this.charts = new Set();
    this.range = null;
    this.crosshair = null;
    this.smoothing = 0;
    this.isLog = false;
    this.xLabel = this.xName = "step";
    this.onRange = () => {};
  }

  draw() {
    for (const chart of this.charts) chart.drawing.changed();
  }

  setRange(range) {
    this.range = range;
    this.onRange(range);
    this.draw();
  }

  setCrosshair(x) {
    this.crosshair = x;
    this.draw();
  }
}
