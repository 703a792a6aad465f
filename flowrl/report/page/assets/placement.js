// Placement graph: pools with their devices and roles, and the flow of data between methods.

function placementSection() {
  const section = makeSection("placement", "Placement and data flow", "Pools, devices and roles; arrows lead from a method to the methods that read its results.");
  const body = el("div", { class: "stack" });
  async function show(run) {
    if (!run.missing.timeline) run.timeline ??= prepareTimeline(await readPart(`timeline-${run.index}`));
    body.replaceChildren(poolCards(run), ...flowGraph(run));
  }
  if (report.runs.length > 1) section.append(runSelect(report.runs, show));
  section.append(body);
  loaders.push(() => show(report.runs[0]));
  return section;
}

function roleChip(name, ranks) {
  const swatch = el("i", { class: "swatch square" });
  const paint = () => { swatch.style.background = roleColor(name); };
  paint();
  redraws.theme.push(paint);
  return el("span", { class: "role-chip" }, swatch, ranks === undefined ? name : `${name} ${ranks}`);
}

function poolCards(run) {
  if (!run.timeline) {
    const names = Object.keys(run.pools);
    const cards = names.map((pool) => {
      const roles = run.roles.filter((role) => String(role.pool).split("+").some((part) => part.trim().split("[")[0] === pool));
      const size = Array.isArray(run.pools[pool]) ? `${run.pools[pool].join(" + ")} devices` : String(run.pools[pool]);
      return el("div", { class: "card pad pool" }, el("h3", {}, `Pool ${pool}`), el("p", { class: "note" }, size),
        el("div", { class: "device" }, el("div", { class: "roles" }, ...roles.map((role) => roleChip(role.name)))));
    });
    return el("div", { class: "stack" }, el("div", { class: "pools" }, ...cards),
      el("p", { class: "note" }, "The devices of each pool are known from trace.json, which this run does not have."));
  }
  const pools = new Map();
  for (const { pool, device, role, rank } of run.timeline.rows) {
    if (!pools.has(pool)) pools.set(pool, new Map());
    const devices = pools.get(pool);
    if (!devices.has(device)) devices.set(device, []);
    devices.get(device).push([role, rank]);
  }
  return el("div", { class: "pools" }, ...[...pools].map(([pool, devices]) =>
    el("div", { class: "card pad pool" }, el("h3", {}, `Pool ${pool}`), el("div", { class: "devices" }, ...[...devices].map(([device, roles]) => {
      const busy = run.timeline.devices[device];
      return el("div", { class: "device" }, el("div", { class: "mono" }, device),
        busy === undefined ? null : el("div", { class: "meter", role: "img", "aria-label": `busy ${percent(busy)}` }, el("i", { style: { width: `${100 * busy}%` } })),
        busy === undefined ? null : el("div", { class: "muted" }, `busy ${percent(busy)} of the time`),
        el("div", { class: "roles" }, ...roles.map(([role, rank]) => roleChip(role, rank))));
    })))));
}

/** Returns whether each edge leads forward. The edges with the most calls that have no cycle lead forward. */
function forwardEdges(edges) {
  const next = new Map();
  const reaches = (from, to) => from === to || [...(next.get(from) ?? [])].some((other) => reaches(other, to));
  const isForward = new Map();
  for (const edge of [...edges].sort((a, b) => b.calls - a.calls)) {
    isForward.set(edge, !reaches(edge.to, edge.from));
    if (isForward.get(edge)) next.set(edge.from, (next.get(edge.from) ?? new Set()).add(edge.to));
  }
  return isForward;
}

/** Returns the layer of each node: the layer after the last node whose results it reads. */
function layersOf(nodes, edges) {
  const layers = new Map(nodes.map((node) => [node.name, 0]));
  for (let changed = true; changed; ) {
    changed = false;
    for (const { from, to } of edges) {
      if (layers.get(to) <= layers.get(from)) {
        layers.set(to, layers.get(from) + 1);
        changed = true;
      }
    }
  }
  return layers;
}

/** Returns columns of nodes, and the points through which each edge leads. An edge has a slot in each layer it crosses. */
function layoutFlow(nodes, edges) {
  const layers = layersOf(nodes, edges);
  const columns = Array.from({ length: Math.max(...layers.values()) + 1 }, () => []);
  for (const node of nodes) columns[layers.get(node.name)].push({ name: node.name, size: 1, sources: [] });
  const slots = new Map(columns.flat().map((slot) => [slot.name, slot]));
  const routes = edges.map((edge) => {
    const route = [slots.get(edge.from)];
    for (let layer = layers.get(edge.from) + 1; layer < layers.get(edge.to); layer++) {
      const slot = { size: 0.4, sources: [route[route.length - 1]] };
      columns[layer].push(slot);
      route.push(slot);
    }
    slots.get(edge.to).sources.push(route[route.length - 1]);
    return [...route, slots.get(edge.to)];
  });
  const center = (slot) => slot.sources.reduce((sum, source) => sum + source.across, 0) / slot.sources.length;
  const largest = Math.max(...columns.map((column) => column.reduce((sum, slot) => sum + slot.size, 0)));
  columns.forEach((column, layer) => {
    if (layer) column.sort((a, b) => center(a) - center(b));
    let at = (largest - column.reduce((sum, slot) => sum + slot.size, 0)) / 2;
    for (const slot of column) {
      slot.layer = layer;
      slot.across = at + slot.size / 2;
      at += slot.size;
    }
  });
  return { columns, slots, routes, largest };
}

function flowGraph(run) {
  const flow = run.timeline?.flow;
  if (!flow || !flow.edges.length) return [];
  const linked = new Set(flow.edges.flatMap((edge) => [edge.from, edge.to]));
  const nodes = flow.nodes.filter((node) => linked.has(node.name));
  const others = flow.nodes.filter((node) => !linked.has(node.name));
  const isForward = forwardEdges(flow.edges);
  const edges = flow.edges.filter((edge) => isForward.get(edge));
  const back = flow.edges.filter((edge) => !isForward.get(edge));
  const holder = el("div", { class: "scroll" });
  const draw = () => holder.clientWidth && holder.replaceChildren(drawFlow(nodes, edges, holder.clientWidth));
  let width = 0;
  new ResizeObserver(() => {
    if (holder.clientWidth === width) return;
    width = holder.clientWidth;
    draw();
  }).observe(holder);
  redraws.theme.push(draw);
  const notes = [];
  if (back.length) notes.push(`Results for a later step: ${back.map((edge) => `${edge.from} to ${edge.to}`).join(", ")}.`);
  if (others.length) notes.push(`Calls that exchange no results with other methods: ${others.map((node) => `${node.name} (${whole.format(node.calls)})`).join(", ")}.`);
  return [el("div", { class: "card pad stack" }, el("h3", {}, "Data flow"), holder, el("p", { class: "note" }, notes.join(" ")))];
}

function drawFlow(nodes, edges, width) {
  const { columns, slots, routes, largest } = layoutFlow(nodes, edges);
  const isVertical = width < 60 + 190 * columns.length;
  const h = 46;
  const w = isVertical ? Math.min(168, width / largest - 10) : 168;
  if (w < 96) return flowList(nodes, edges);
  const size = isVertical ? [width, columns.length * (h + 42) - 34] : [width, largest * (h + 20)];
  const place = (slot) => (isVertical
    ? { x: (slot.across / largest) * size[0], y: 4 + h / 2 + slot.layer * (h + 42) }
    : { x: w / 2 + 2 + (slot.layer / Math.max(1, columns.length - 1)) * (size[0] - w - 4), y: (slot.across / largest) * size[1] });
  const image = svg("svg", { width: size[0], height: size[1], viewBox: `0 0 ${size[0]} ${size[1]}`, role: "img", "aria-label": `Data flow: ${edges.map((edge) => `${edge.from} to ${edge.to}`).join("; ")}` });
  const color = cssColor("--muted");
  image.append(svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, orient: "auto" }, svg("path", { d: "M0 0 8 4 0 8z", fill: color }))));
  edges.forEach((edge, i) => {
    const points = routes[i].map(place);
    const half = isVertical ? { x: 0, y: h / 2 } : { x: w / 2, y: 0 };
    let path = `M${points[0].x + half.x} ${points[0].y + half.y}`;
    points.slice(1).forEach((to, k) => {
      const from = points[k];
      const [start, end] = [k ? 0 : 1, k === points.length - 2 ? 1 : 0];
      const [x0, y0] = [from.x + start * half.x, from.y + start * half.y];
      const [x1, y1] = [to.x - end * (half.x ? half.x + 1 : 0), to.y - end * (half.y ? half.y + 1 : 0)];
      path += isVertical ? ` C${x0} ${(y0 + y1) / 2} ${x1} ${(y0 + y1) / 2} ${x1} ${y1}` : ` C${(x0 + x1) / 2} ${y0} ${(x0 + x1) / 2} ${y1} ${x1} ${y1}`;
    });
    const line = svg("path", { d: path, fill: "none", stroke: color, "stroke-width": 1.4, "marker-end": "url(#arrow)" });
    line.append(svg("title", {}, `${edge.from} to ${edge.to}: read by ${plural(edge.calls, "call")}`));
    image.append(line);
  });
  for (const node of nodes) image.append(flowNode(node, place(slots.get(node.name)), w, h));
  return image;
}

/** The graph as a list, for screens on which the names of the methods do not fit side by side. */
function flowList(nodes, edges) {
  return el("table", {}, el("tbody", {}, ...nodes.map((node) => {
    const targets = edges.filter((edge) => edge.from === node.name).map((edge) => edge.to);
    return el("tr", {}, el("th", { scope: "row" }, roleChip(node.name.split(".")[0]), el("div", {}, node.name.split(".")[1])),
      el("td", {}, targets.length ? `→ ${targets.join(", ")}` : ""), el("td", { class: "num muted" }, whole.format(node.calls)));
  })));
}

function flowNode(node, { x, y }, w, h) {
  const [role, method] = node.name.split(".");
  const group = svg("g", {});
  group.append(
    svg("rect", { x: x - w / 2, y: y - h / 2, width: w, height: h, rx: 8, fill: cssColor("--sunken"), stroke: cssColor("--line") }),
    svg("rect", { x: x - w / 2, y: y - h / 2 + 6, width: 4, height: h - 12, rx: 2, fill: roleColor(role) }),
    fitText(svg("text", { x: x - w / 2 + 13, y: y - 3 }), method, w - 20, 13),
    fitText(svg("text", { x: x - w / 2 + 13, y: y + 14, class: "sub" }), w < 120 ? role : `${role} · ${whole.format(node.calls)} calls`, w - 20, 11.5),
    svg("title", {}, `${node.name}: ${plural(node.calls, "call")} in pool ${node.pool}`),
  );
  return group;
}

function fitText(node, text, width, size) {
  const most = Math.max(3, Math.floor(width / (size * 0.54)));
  node.textContent = text.length > most ? `${text.slice(0, most - 1)}…` : text;
  return node;
}
