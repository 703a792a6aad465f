// Browser of the saved rows: filter, search, sort, details with colored tokens, and the same prompt across steps.

/** The rows of all runs in one numbering. Row `id` is row `id - offset` of its run. */
class RowStore {
  constructor(runs) {
    this.parts = [];
    let offset = 0;
    for (const { run, data } of runs) {
      this.parts.push({ run, data, offset });
      offset += data.num_rows;
    }
    this.size = offset;
  }

  locate(id) {
    let part = this.parts[0];
    for (const other of this.parts) if (other.offset <= id) part = other;
    return [part, id - part.offset];
  }

  get(id, column) {
    const [{ data }, i] = this.locate(id);
    return data[column][i];
  }

  name(id, column) {
    const [{ data }, i] = this.locate(id);
    return data[column].values[data[column].index[i]] ?? null;
  }

  text(id, column) {
    const [{ data }, i] = this.locate(id);
    return column === "response" ? data.response[i] : data.texts[data[column][i]] ?? null;
  }

  scores(id) {
    const [{ data }, i] = this.locate(id);
    return Object.entries(data.scores).map(([name, values]) => [name, values[i]]).filter(([, value]) => value !== null);
  }

  hasTokens(id) {
    const [{ data }, i] = this.locate(id);
    return data.has_tokens.has(i);
  }
}

const SORTS = { step: "Step", score: "Score", advantage: "Advantage", response_length: "Tokens" };

class Browser {
  constructor(store) {
    this.store = store;
    this.sort = ["step", 1];
    this.selected = null;
    this.list = el("div", { class: "rows", role: "listbox", tabindex: "0", "aria-label": "Completions" });
    this.spacer = el("div", { class: "spacer" });
    this.list.append(this.spacer);
    this.count = el("span", { class: "note", "aria-live": "polite" });
    this.detail = el("div", { class: "card pad stack" });
    this.head = el("div", { class: "row-head" });
    this.node = el("div", { class: "stack" }, this.makeFilters(),
      el("div", { class: "browser" }, el("div", { class: "card list-box" }, this.head, this.list), this.detail));
    this.list.addEventListener("scroll", () => this.draw());
    this.list.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(this.list);
    redraws.theme.push(() => this.selected !== null && this.showDetail());
    redraws.runs.push(() => this.apply());
    this.apply();
  }

  makeFilters() {
    const { store } = this;
    const update = () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.apply(), 120);
    };
    const options = (values) => values.map(([value, label]) => el("option", { value }, label));
    const kinds = [...new Set(store.parts.flatMap(({ data }) => data.kind.values))];
    this.kind = el("select", { "aria-label": "Kind of rows", onchange: update }, ...options([["", "all rows"], ...kinds.map((kind) => [kind, `${kind} rows`])]));
    this.steps = [...new Set(store.parts.flatMap(({ data }) => data.step))].sort((a, b) => a - b);
    this.step = el("select", { "aria-label": "Step", onchange: update }, ...options([["", "all steps"], ...this.steps.map((step) => [String(step), `step ${step}`])]));
    this.search = el("input", { type: "search", placeholder: "Search prompts and responses", "aria-label": "Search prompts and responses", oninput: update });
    this.low = el("input", { type: "number", step: "any", placeholder: "min", "aria-label": "Smallest score", oninput: update });
    this.high = el("input", { type: "number", step: "any", placeholder: "max", "aria-label": "Largest score", oninput: update });
    this.finish = el("select", { "aria-label": "Finish reason", onchange: update }, ...options([["", "any end"], ["stop", "stopped"], ["length", "length limit"], ["failed", "reward failed"]]));
    const hasTokens = store.parts.some(({ data }) => data.has_tokens.size);
    this.withTokens = el("input", { type: "checkbox", onchange: update });
    const search = el("label", { class: "grow search" }, this.search);
    return el("div", { class: "controls" }, search, this.kind, this.step, el("label", {}, "Score", this.low, "to", this.high), this.finish,
      hasTokens ? el("label", {}, this.withTokens, "with token values") : null, this.count);
  }

  apply() {
    const { store } = this;
    const words = this.search.value.trim().toLowerCase();
    const [low, high] = [this.low, this.high].map((input) => (input.value === "" ? null : Number(input.value)));
    const ids = [];
    for (const { run, data, offset } of store.parts) {
      if (!run.isShown) continue;
      const kind = this.kind.value ? data.kind.values.indexOf(this.kind.value) : null;
      const step = this.step.value ? Number(this.step.value) : null;
      const reason = this.finish.value && this.finish.value !== "failed" ? data.finish_reason.values.indexOf(this.finish.value) : null;
      const prompts = words ? data.texts.map((text) => text.toLowerCase().includes(words)) : null;
      for (let i = 0; i < data.num_rows; i++) {
        if (kind !== null && data.kind.index[i] !== kind) continue;
        if (step !== null && data.step[i] !== step) continue;
        if (reason !== null && data.finish_reason.index[i] !== reason) continue;
        if (this.finish.value === "failed" && !data.failures[i]) continue;
        const score = data.score[i];
        if (low !== null && !(score !== null && score >= low)) continue;
        if (high !== null && !(score !== null && score <= high)) continue;
        if (this.withTokens.checked && !data.has_tokens.has(i)) continue;
        if (words && !prompts[data.prompt[i]] && !(data.response[i] ?? "").toLowerCase().includes(words)) continue;
        ids.push(offset + i);
      }
    }
    const [column, sign] = this.sort;
    const key = new Map(ids.map((id) => [id, store.get(id, column)]));
    // Rows without a value are last in both orders.
    ids.sort((a, b) => {
      const [x, y] = [key.get(a), key.get(b)];
      if (x === y) return a - b;
      if (x === null) return 1;
      return y === null ? -1 : sign * (x - y);
    });
    this.ids = ids;
    this.makeHead();
    this.count.textContent = `${whole.format(ids.length)} of ${plural(store.size, "row")}`;
    this.list.scrollTop = 0;
    this.rowHeight = 0;
    if (!ids.includes(this.selected)) this.selected = ids[0] ?? null;
    this.showDetail();
    this.draw();
  }

  makeHead() {
    const button = (column) => {
      const [current, sign] = this.sort;
      const isSorted = current === column;
      return el("button", {
        type: "button",
        class: column === "step" ? "" : "num",
        "aria-sort": isSorted ? (sign === 1 ? "ascending" : "descending") : undefined,
        onclick: () => {
          this.sort = isSorted ? [column, -sign] : [column, column === "step" ? 1 : -1];
          this.apply();
        },
      }, SORTS[column] + (isSorted ? (sign === 1 ? " ↑" : " ↓") : ""));
    };
    const label = (text) => el("span", { class: "wide-only" }, text);
    this.head.replaceChildren(button("step"), label(""), label("Prompt"), label("Response"), button("score"), button("advantage"), button("response_length"));
  }

  draw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.paint();
    });
  }

  paint() {
    const height = matchMedia("(max-width: 700px)").matches ? 62 : 34;
    this.rowHeight = height;
    this.spacer.style.height = `${height * this.ids.length}px`;
    const first = Math.max(0, Math.floor(this.list.scrollTop / height) - 5);
    const last = Math.min(this.ids.length, Math.ceil((this.list.scrollTop + this.list.clientHeight) / height) + 5);
    const rows = [];
    for (let i = first; i < last; i++) rows.push(this.makeRow(i, height));
    if (!rows.length) rows.push(el("p", { class: "note pad" }, "No row matches the filters."));
    this.spacer.replaceChildren(...rows);
    if (this.selected !== null) this.list.setAttribute("aria-activedescendant", `row-${this.selected}`);
  }

  makeRow(i, height) {
    const { store } = this;
    const id = this.ids[i];
    const [{ run }] = store.locate(id);
    const kind = store.name(id, "kind");
    const mark = el("span", { title: report.runs.length > 1 ? `${run.name}, ${kind}` : kind });
    const isEvaluation = kind === "evaluation";
    mark.append(el("i", { class: "swatch square", style: { display: "inline-block", background: isEvaluation ? "transparent" : paletteColor(run.index), border: `2px solid ${paletteColor(run.index)}` } }));
    const line = (text) => (text ?? "").slice(0, 200).replace(/\s+/g, " ");
    const number = (column) => el("span", { class: `num ${column}` }, formatNumber(store.get(id, column)));
    return el("div", {
      class: "row", role: "option", id: `row-${id}`, "aria-selected": String(id === this.selected), style: { top: `${i * height}px` }, onclick: () => this.select(i),
    }, el("span", {}, String(store.get(id, "step"))), mark, el("span", { class: "prompt" }, line(store.text(id, "prompt"))),
    el("span", { class: "response" }, line(store.text(id, "response"))), number("score"), number("advantage"), number("response_length"));
  }

  select(i) {
    if (i < 0 || i >= this.ids.length) return;
    this.selected = this.ids[i];
    const top = i * this.rowHeight;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    const bottom = top + this.rowHeight - this.list.clientHeight;
    if (bottom > this.list.scrollTop) this.list.scrollTop = bottom;
    this.draw();
    this.showDetail();
  }

  onKey(event) {
    const at = this.ids.indexOf(this.selected);
    const page = Math.floor(this.list.clientHeight / this.rowHeight) - 1;
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: Math.min(at + page, this.ids.length - 1), PageUp: Math.max(0, at - page), Home: 0, End: this.ids.length - 1 };
    if (!(event.key in moves)) return;
    this.select(moves[event.key]);
    event.preventDefault();
  }

  async showDetail() {
    const id = this.selected;
    if (id === null) {
      this.detail.replaceChildren(el("p", { class: "note" }, "Select a row to read it."));
      return;
    }
    const { store } = this;
    const [{ run }, i] = store.locate(id);
    const tokens = store.hasTokens(id) ? (await readPart(`tokens-${run.index}`)).rows[i] : null;
    if (this.selected !== id) return;
    const at = this.ids.indexOf(id);
    const move = (offset, label, name) => el("button", { type: "button", "aria-label": name, disabled: !this.ids[at + offset] && this.ids[at + offset] !== 0, onclick: () => this.select(at + offset) }, label);
    const heading = [`Step ${store.get(id, "step")}`, `${store.name(id, "kind")} row ${store.get(id, "row")}`];
    if (store.name(id, "set") !== null) heading.push(`set ${store.name(id, "set")}`);
    if (report.runs.length > 1) heading.push(run.name);
    const answer = store.text(id, "answer");
    this.detail.replaceChildren(...[
      el("div", { class: "detail-head" }, el("h3", {}, heading.join(" · ")), el("div", { class: "segments" }, move(-1, "↑", "Previous row"), move(1, "↓", "Next row"))),
      this.facts(id), ...this.failures(id),
      el("h4", {}, "Prompt"), el("div", { class: "text", tabindex: "0" }, store.text(id, "prompt") ?? ""),
      ...this.response(id, tokens),
      answer === null ? null : el("h4", {}, "Answer in the dataset"), answer === null ? null : el("div", { class: "text" }, answer),
      ...this.samePrompt(id),
    ].filter(Boolean));
  }

  facts(id) {
    const { store } = this;
    const values = [["Score", formatNumber(store.get(id, "score"))]];
    for (const [name, value] of store.scores(id)) values.push([name, formatNumber(value)]);
    const version = store.get(id, "version");
    const newest = store.get(id, "newest_version");
    const candidates = [
      ["Advantage", store.get(id, "advantage")],
      ["Tokens", store.get(id, "response_length")],
      ["Environment tokens", store.get(id, "environment_length") || null],
      ["Weight version", version === null ? null : version === newest || newest === null ? String(version) : `${version} to ${newest}`],
      ["Staleness", store.get(id, "staleness")],
      ["End", store.name(id, "finish_reason")],
      ["Sample", store.get(id, "sample")],
    ];
    for (const [name, value] of candidates) if (value !== null && value !== undefined) values.push([name, typeof value === "number" ? formatNumber(value) : value]);
    return el("dl", { class: "facts" }, ...values.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  failures(id) {
    const [{ data }, i] = this.store.locate(id);
    return Object.entries(data.failures[i] ?? {}).map(([name, message]) => el("div", { class: "finding" }, el("strong", {}, `Reward ${name} failed: `), message));
  }

  response(id, tokens) {
    const [{ data }, i] = this.store.locate(id);
    const title = el("h4", {}, "Response");
    if (tokens) return coloredTokens(title, tokens);
    const segments = data.segments[i];
    const content = segments ? segments.map(([kind, text]) => el("span", { class: kind, title: kind === "environment" ? "returned by the environment" : "sampled by the policy" }, text)) : [data.response[i] ?? ""];
    const note = segments ? el("p", { class: "note" }, "Text with a dotted line was returned by the environment.") : null;
    return [title, el("div", { class: "text", tabindex: "0" }, ...content), note];
  }

  samePrompt(id) {
    const { store } = this;
    const prompt = store.text(id, "prompt");
    const kind = store.name(id, "kind");
    const same = [];
    for (const { run, data, offset } of store.parts) {
      const text = data.texts.indexOf(prompt);
      const own = data.kind.values.indexOf(kind);
      if (!run.isShown || text < 0) continue;
      for (let i = 0; i < data.num_rows; i++) if (data.prompt[i] === text && data.kind.index[i] === own) same.push(offset + i);
    }
    if (same.length < 2) return [];
    same.sort((a, b) => store.get(a, "step") - store.get(b, "step") || a - b);
    const shown = same.length > 100 ? same.filter((other, k) => other === id || k % Math.ceil(same.length / 100) === 0) : same;
    const rows = shown.map((other) => {
      const open = el("button", { type: "button", class: "ghost", onclick: () => this.open(other) }, String(store.get(other, "step")));
      const several = report.runs.length > 1 ? el("td", {}, runLabel(store.locate(other)[0].run)) : null;
      return el("tr", { "aria-current": other === id ? "true" : undefined }, el("td", {}, open), several, el("td", { class: "num" }, formatNumber(store.get(other, "score"))), el("td", { style: { paddingLeft: "14px" } }, (store.text(other, "response") ?? "").slice(0, 300)));
    });
    const heads = ["Step", ...(report.runs.length > 1 ? ["Run"] : [])].map((name) => el("th", {}, name));
    return [
      el("h4", {}, `The same prompt in ${plural(same.length, `${kind} row`)}`),
      el("div", { class: "same" }, el("table", {}, el("thead", {}, el("tr", {}, ...heads, el("th", { class: "num" }, "Score"), el("th", { style: { paddingLeft: "14px" } }, "Response"))), el("tbody", {}, ...rows))),
    ];
  }

  /** Selects a row, also if the filters hide it. */
  open(id) {
    const at = this.ids.indexOf(id);
    if (at >= 0) this.select(at);
    else {
      this.selected = id;
      this.draw();
      this.showDetail();
    }
  }
}

let tokenMetric = null;

/** Colors: blue at the lower end, orange at the upper end, as in flowrl/report/token_values.py. */
function tokenColor(scale, value) {
  const span = scale.high - scale.center;
  const position = span <= 0 ? 0 : Math.max(-1, Math.min(1, (value - scale.center) / span));
  return mix(cssColor("--sunken"), position > 0 ? "#d96b0b" : "#2166ac", Math.abs(position) * (isDark() ? 0.9 : 0.8));
}

function coloredTokens(title, tokens) {
  const names = Object.keys(tokens.metrics);
  const text = el("div", { class: "text", tabindex: "0", role: "group", "aria-label": "Response tokens. Arrow keys read the values of tokens." });
  const readout = el("p", { class: "note", "aria-live": "polite" }, "Point at a token, or use the arrow keys, to read its values.");
  const scaleBox = el("span", { class: "scale" });
  const spans = tokens.text.map((piece, i) => el("span", { class: tokens.environment[i] ? "token environment" : "token", onpointerenter: () => describe(i), onclick: () => describe(i) }, piece));
  text.append(...spans);
  let current = -1;
  function describe(i) {
    if (current >= 0) spans[current].style.outline = "";
    current = i;
    spans[i].style.outline = `2px solid ${cssColor("--accent")}`;
    const values = names.map((name) => `${tokens.metrics[name].title} ${formatNumber(tokens.metrics[name].values[i])}`);
    readout.replaceChildren(el("span", { class: "mono" }, JSON.stringify(tokens.text[i])), ` token ${i}: ${values.join(", ")}`);
  }
  text.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    describe(Math.min(spans.length - 1, Math.max(0, current + move)));
    event.preventDefault();
  });
  function color() {
    tokenMetric = choice.value;
    const metric = tokens.metrics[choice.value];
    spans.forEach((span, i) => {
      const value = metric?.values[i] ?? null;
      const background = value === null ? "" : tokenColor(metric.scale, value);
      span.style.background = background;
      span.style.color = background ? (luminance(background) > 0.3 ? "#10151c" : "#ffffff") : "";
    });
    scaleBox.replaceChildren();
    if (!metric) return;
    const { low, high, center } = metric.scale;
    const stops = [low, (low + high) / 2, high].map((value) => tokenColor(metric.scale, value)).join(", ");
    const middle = center > low && center < high ? ` (center ${formatNumber(center)})` : "";
    scaleBox.append(formatNumber(low), el("i", { style: { background: `linear-gradient(90deg, ${stops})` } }), `${formatNumber(high)}${middle}`);
    choice.title = metric.meaning;
  }
  const choice = el("select", { "aria-label": "Color of the tokens", onchange: color }, ...names.map((name) => el("option", { value: name, selected: name === tokenMetric }, tokens.metrics[name].title)), el("option", { value: "" }, "no color"));
  color();
  return [el("div", { class: "detail-head" }, title, el("span", { class: "controls" }, scaleBox, choice)), text, readout];
}

function completionsSection() {
  const section = makeSection("completions", "Completions", "Saved prompts and responses.");
  if (report.runs.some((run) => !run.missing.rows)) loaders.push(() => loadCompletions(section));
  for (const run of report.runs) if (run.missing.rows) section.append(missingNote(run, "rows"));
  return section;
}

async function loadCompletions(section) {
  const runs = [];
  for (const run of report.runs) {
    if (run.missing.rows) continue;
    const data = await readPart(`rows-${run.index}`);
    data.has_tokens = new Set(data.has_tokens);
    runs.push({ run, data });
  }
  section.append(new Browser(new RowStore(runs)).node);
  for (const { run, data } of runs) {
    const notes = [];
    if (data.num_rows < data.num_saved) notes.push(`${whole.format(data.num_rows)} of ${plural(data.num_saved, "saved row")} are in this report, from evenly spaced steps.`);
    if (data.num_cut) notes.push(`${plural(data.num_cut, "text")} longer than ${plural(data.max_characters, "character")} were cut.`);
    if (data.num_token_rows < data.num_saved_token_rows) notes.push(`${whole.format(data.num_token_rows)} of ${plural(data.num_saved_token_rows, "row")} with token values have them in this report.`);
    if (notes.length) section.append(el("p", { class: "note" }, report.runs.length > 1 ? `${run.name}: ` : "", notes.join(" ")));
  }
}
