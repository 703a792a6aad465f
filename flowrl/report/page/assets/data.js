// Reading of the embedded data, creation of elements, formats of numbers, and colors.

const $ = (id) => document.getElementById(id);

/** Creates an element. Text is always added as text, never parsed as HTML. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "class") node.className = value;
    else if (name in node && name !== "list" && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function bytesOfBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

const decoded = new Map();

/** Decodes a part of the report on first use. Returns null if the report does not have it. */
function readPart(name) {
  if (!decoded.has(name)) decoded.set(name, decodePart(name));
  return decoded.get(name);
}

async function decodePart(name) {
  const node = $(`data-${name}`);
  if (!node) return null;
  const stream = new Blob([bytesOfBase64(node.textContent)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const value = JSON.parse(await new Response(stream).text());
  node.remove();
  return value;
}

// Numbers.

const plain = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 4 });
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 4 });

function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  return size >= 1000 ? whole.format(value) : plain.format(value);
}

function formatTick(value, spacing) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e4) return compact.format(value);
  if (size < 1e-4) return value.toExponential(0).replace("e+", "e");
  return value.toFixed(Math.min(6, Math.max(0, Math.ceil(-Math.log10(spacing) - 1e-9))));
}

function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "-";
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${plain.format(Number((seconds * 1e3).toPrecision(3)))} ms`;
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 120) return `${minutes} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const percent = (value) => `${(100 * value).toFixed(value > 0.0995 && value < 0.9995 ? 0 : 1)} %`;
const plural = (count, noun) => `${whole.format(count)} ${noun}${count === 1 ? "" : "s"}`;

// Colors. All palettes derive from that of Okabe and Ito, which people with color blindness can distinguish.

const PALETTE = {
  light: ["#0072b2", "#d55e00", "#008a64", "#a8478f", "#8a6a00", "#3f95cc", "#59626d", "#7a2f0a"],
  dark: ["#5cb8ee", "#ff9a4d", "#35c99b", "#e59fd3", "#efdf5a", "#9ec9ff", "#b3bdc9", "#ffc8a6"],
};
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3]];
const ROLE_COLORS = { actor: 0, student: 0, rollout: 2, critic: 1, reference: 3, teacher: 3, reward: 4, environment: 5 };

const isDark = () => document.documentElement.dataset.theme === "dark";
const paletteColor = (i) => PALETTE[isDark() ? "dark" : "light"][i % 8];
const roleColor = (role) => paletteColor(ROLE_COLORS[role] ?? 6);
const cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function mix(color, other, share) {
  const parse = (text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
  const [a, b] = [parse(color), parse(other)];
  return `#${a.map((v, i) => Math.round(v + (b[i] - v) * share).toString(16).padStart(2, "0")).join("")}`;
}

/** Functions that fill sections with large data. They run after the page is shown. */
const loaders = [];

/** Calls `draw` after each call of `changed()`, as soon as the canvas is in view. */
class Drawing {
  constructor(canvas, draw) {
    this.draw = draw;
    this.isVisible = false;
    this.isChanged = false;
    new IntersectionObserver((entries) => {
      this.isVisible = entries[entries.length - 1].isIntersecting;
      this.run();
    }, { rootMargin: "300px" }).observe(canvas);
    new ResizeObserver(() => this.changed()).observe(canvas);
  }

  changed() {
    this.isChanged = true;
    this.run();
  }

  run() {
    if (this.frame || !this.isVisible || !this.isChanged) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.isChanged = false;
      this.draw();
    });
  }
}

/** Functions to call when the theme or the selection of runs changes. */
const redraws = { theme: [], runs: [] };
