"use strict";
const plan = JSON.parse(document.getElementById("plan").textContent);
const $ = (id) => document.getElementById(id);
const make = (tag, cls, ...inside) => {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  node.append(...inside.filter((x) => x !== null && x !== undefined));  // strings become text, never markup
  return node;
};
const GIB = 2 ** 30;
const size = (b) => (b <= 0 ? "–" : b >= GIB / 10 ? (b / GIB).toFixed(1) + " GiB" : (b / 2 ** 20).toFixed(1) + " MiB");
const time = (s) => (s >= 1 ? s.toFixed(1) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(1) + " ms" : (s * 1e6).toFixed(0) + " µs");
const tone = (i) => `var(--a${i % 5})`;
const MOST = 4096;
const shown = Math.min(plan.world_size, MOST);

// ---- where every rank is: node, local rank, pool, rank in the pool
const nodeOf = [], localOf = [], poolOf = new Array(plan.world_size), poolRank = new Array(plan.world_size);
plan.nodes.forEach((node, i) => { for (let l = 0; l < node.ranks; l++) { nodeOf.push(i); localOf.push(l); } });
for (const pool of plan.pools) {
  pool.list = [];
  for (const [a, b] of pool.ranks) for (let r = a; r <= b; r++) { poolOf[r] = pool; poolRank[r] = pool.list.length; pool.list.push(r); }
}
const coord = (axis, r) => Math.floor(r / axis.stride) % axis.size;
const members = (axis, r) => Array.from({ length: axis.size }, (_, i) => r + (i - coord(axis, r)) * axis.stride);
const groupIndex = (axis, r) => Math.floor(r / (axis.stride * axis.size)) * axis.stride + (r % axis.stride);
const runs = (list) => {
  const out = [];
  for (const r of list) { const last = out[out.length - 1]; if (last && last[1] === r - 1) last[1] = r; else out.push([r, r]); }
  const texts = out.length > 2 && list.length <= 10 ? list.map(String) : out.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`));
  return texts.length > 12 ? texts.slice(0, 12).join(", ") + ` … ${texts.length - 12} more` : texts.join(", ");
};

// ---- views: the ranks, the pools, and every distinct layout
const NAMES = { fsdp: { mesh: "FSDP", batch: "Ulysses" }, megatron: { mesh: "Megatron", expert: "Experts" } };
const views = [{ label: "RANK", kind: "rank" }, { label: "Pools", kind: "pools" }];
for (const role of plan.roles) {
  for (const [fold, layout] of Object.entries(role.layouts)) {
    const label = role.role === "rollout" ? "Rollout" : (NAMES[role.engine] || {})[fold] || fold;
    const key = JSON.stringify([label, role.pool, layout.axes]);
    const same = views.find((v) => v.key === key);
    if (same) same.roles.push(role.role);
    else views.push({ key, label, kind: "layout", axes: layout.axes, pool: role.pool, roles: [role.role], role, axis: null });
  }
}
for (const view of views) {
  if (view.kind !== "layout") continue;
  const wide = view.axes.filter((a) => a.size > 1);
  view.axis = wide.length ? wide[wide.length - 1].name : view.axes[0].name;
}
let view = views[0], phase = null, chosen = null;

// ---- nodes and ranks
const cells = [];
function drawNodes() {
  const box = $("nodes");
  box.className = shown > 1024 ? "tiny" : shown > 64 ? "small" : "";
  let first = 0;
  for (const node of plan.nodes) {
    if (first >= shown) break;
    const ranks = make("div", "ranks");
    ranks.style.gridTemplateColumns = `repeat(${Math.min(node.ranks, 4)}, minmax(0, 1fr))`;
    for (let r = first; r < Math.min(first + node.ranks, shown); r++) {
      const cell = make("button", "rank", make("b", "", String(r)), make("small", ""), make("i", "fill"));
      cell.type = "button";
      cell.dataset.rank = r;
      cell.tabIndex = r === 0 ? 0 : -1;
      cells.push(cell);
      ranks.append(cell);
    }
    const tag = node.tag ? make("span", "", node.tag) : null;
    const card = make("div", "node", make("h3", "", make("span", "", node.address), tag), ranks);
    card.title = node.address;
    box.append(card);
    first += node.ranks;
  }
  if (plan.world_size > shown) {
    $("more").hidden = false;
    $("more").textContent = `The first ${shown} of ${plan.world_size} ranks are drawn. The others follow the same formulas; spmd-rl plan --rank N tells any rank's story.`;
  }
  const rankOf = (event) => { const cell = event.target.closest(".rank"); return cell ? Number(cell.dataset.rank) : null; };
  box.addEventListener("mouseover", (e) => { const r = rankOf(e); if (r !== null) choose(r); });
  box.addEventListener("focusin", (e) => { const r = rankOf(e); if (r !== null) choose(r); });
  box.addEventListener("keydown", (e) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 4, ArrowUp: -4 }[e.key];
    const to = e.key === "Home" ? 0 : e.key === "End" ? shown - 1 : step ? chosen + step : null;
    if (to === null) return;
    e.preventDefault();
    if (to >= 0 && to < shown) cells[to].focus();
  });
}
function inView(r) { return view.kind !== "layout" || poolOf[r].name === view.pool; }
function hue(r) {
  const golden = 137.508;
  if (view.kind === "rank") return (nodeOf[r] * golden + 250) % 360;
  if (view.kind === "pools") return (plan.pools.indexOf(poolOf[r]) * 95 + 250) % 360;
  const axis = view.axes.find((a) => a.name === view.axis);
  return (groupIndex(axis, poolRank[r]) * golden + 250) % 360;
}
function caption(r) {
  if (view.kind === "rank") return `local ${localOf[r]}`;
  if (view.kind === "pools") return `${poolOf[r].name} ${poolRank[r]}`;
  if (!inView(r)) return poolOf[r].name;
  const wide = view.axes.filter((a) => a.size > 1);
  return (wide.length ? wide : view.axes.slice(-1)).map((a) => `${a.name}${coord(a, poolRank[r])}`).join(" ");
}
function collects(role, r) {
  const axes = (role.layouts.batch || role.layouts.mesh).axes;
  return Object.entries(role.collects).every(([name, at]) => coord(axes.find((a) => a.name === name), poolRank[r]) === at);
}
function paint() {
  for (let r = 0; r < shown; r++) {
    const cell = cells[r], here = inView(r), words = caption(r);
    cell.classList.toggle("out", !here);
    cell.classList.toggle("collects", view.kind === "layout" && here && collects(view.role, r));
    cell.style.setProperty("--hue", hue(r).toFixed(0));
    cell.querySelector("small").textContent = words;
    cell.setAttribute("aria-label", `rank ${r}, ${plan.nodes[nodeOf[r]].address}, ${words}`);
    const memory = memoryOf(r, phase);
    cell.querySelector(".fill").style.width = memory ? `${Math.min(100, (100 * memory.peak) / plan.card.usable)}%` : "0";
  }
  for (const button of $("views").children) button.setAttribute("aria-pressed", String(views[button.dataset.view] === view));
  drawLegend();
  light();
}
function drawLegend() {
  const box = $("legend");
  box.replaceChildren();
  if (view.kind === "rank") box.append("Colour: the node. Ranks are numbered by node address, then local rank.");
  if (view.kind === "pools") for (const pool of plan.pools) box.append(make("span", "", `${pool.name}: ${pool.size} ranks for ${pool.roles.join(", ") || "nobody"}`));
  if (view.kind !== "layout") return;
  box.append("Same colour, same process group along");
  view.axes.forEach((axis, i) => {
    const chip = make("button", "axis", make("i", ""), `${axis.name} = ${axis.size}`);
    chip.type = "button";
    chip.style.setProperty("--tone", tone(i));
    chip.setAttribute("aria-pressed", String(axis.name === view.axis));
    chip.addEventListener("click", () => { view.axis = axis.name; paint(); });
    box.append(chip);
  });
  box.append(`for ${view.roles.join(", ")}` + (view.pool === "global" ? "" : ` on pool ${view.pool}`) + ". A dot marks the ranks that collect results.");
}

// ---- the chosen rank
function choose(r) {
  if (chosen !== null && cells[chosen]) cells[chosen].tabIndex = -1;
  chosen = r;
  cells[r].tabIndex = 0;
  light();
}
function litBy(r) {
  const found = new Map();
  if (view.kind !== "layout" || !inView(r)) return found;
  view.axes.forEach((axis, i) => {
    if (axis.size === 1) return;
    for (const m of members(axis, poolRank[r])) { const rank = poolOf[r].list[m]; if (!found.has(rank) || axis.name === view.axis) found.set(rank, tone(i)); }
  });
  return found;
}
function light() {
  const lit = chosen === null ? new Map() : litBy(chosen);
  for (let r = 0; r < shown; r++) {
    const ring = lit.get(r);
    cells[r].classList.toggle("lit", ring !== undefined);
    cells[r].classList.toggle("dim", lit.size > 0 && ring === undefined && r !== chosen);
    cells[r].classList.toggle("chosen", r === chosen);
    if (ring) cells[r].style.setProperty("--ring", ring); else cells[r].style.removeProperty("--ring");
  }
  tell();
}
function tell() {
  const box = $("story");
  box.replaceChildren();
  if (chosen === null) {
    box.append(make("h2", "", "One rank, several hats"), make("p", "where", "Hover over a rank, or press Tab and the arrow keys, to see its place in this view and the process groups it is in."));
    return;
  }
  const r = poolRank[chosen], pool = poolOf[chosen];
  box.append(make("h2", "", `rank ${chosen}`), make("p", "where", `${plan.nodes[nodeOf[chosen]].address}, local rank ${localOf[chosen]}, GPU ${Math.floor(localOf[chosen] / plan.ranks_per_gpu)}. In pool ${pool.name} it is r = ${r} of ${pool.size}.`));
  const told = views.filter((v) => v.kind === "layout" && v.pool === pool.name && (view.kind !== "layout" || v === view));
  for (const v of told) {
    box.append(make("h3", "", `${v.label} (${v.roles.join(", ")})`));
    v.axes.forEach((axis, i) => {
      const line = make("div", "formula", make("b", "", axis.name), make("code", "", axis.size === 1 ? "0, the only place" : axis.formula === "r" ? `r = ${r}` : `${axis.formula} = ${axis.formula.replace("r", r)} = ${coord(axis, r)}`));
      line.style.setProperty("--tone", tone(i));
      if (axis.size > 1) line.append(make("div", "members", `with ranks ${runs(members(axis, r).map((m) => pool.list[m]))}`));
      box.append(line);
    });
    const axes = (v.role.layouts.batch || v.role.layouts.mesh).axes, dp = axes.find((a) => a.name === "dp");
    if (v === view || view.kind !== "layout") box.append(make("p", "where", `Rows: part ${coord(dp, r)} of ${dp.size}. ` + (collects(v.role, chosen) ? "It collects the results." : "Another rank collects the results.")));
  }
  const bars = plan.phases.filter((p) => !p.skipped).map((p) => [p, memoryOf(chosen, p)]).filter(([, m]) => m);
  if (!bars.length) return;
  box.append(make("h3", "", `Memory by phase (${size(plan.card.usable)} usable)`));
  const items = make("div", "items");
  for (const [p, m] of bars) items.append(make("span", "", p.name), bar(m.peak / plan.card.usable, roleTone(p.role)), make("span", "", size(m.peak)));
  box.append(items);
}

// ---- phases, memory, traffic
function roleTone(role) { const i = plan.roles.findIndex((x) => x.role === role); return i < 0 ? "var(--strong)" : tone(i); }
function bar(share, colour) {
  const fill = make("i", "");
  fill.style.width = `${Math.min(100, Math.max(0, share * 100)).toFixed(1)}%`;
  const box = make("div", "bar", fill);
  box.style.setProperty("--tone", share > 1 ? "var(--bad)" : colour);
  return box;
}
function memoryOf(r, p) {
  if (!p || p.pool !== poolOf[r].name) return null;
  const role = plan.roles.find((x) => x.role === p.role), pp = role && role.layouts.mesh.axes.find((a) => a.name === "pp");
  const stage = pp ? coord(pp, poolRank[r]) : 0;
  return plan.memory.find((m) => m.phase === p.name && m.pool === p.pool && m.stage === stage) || null;
}
function worst(p) {
  return plan.memory.filter((m) => m.phase === p.name).reduce((a, b) => (a && a.peak >= b.peak ? a : b), null);
}
function drawTimeline() {
  $("stepnote").textContent = `Schedule: ${plan.schedule}. Memory is the peak of tensors on the fullest rank when every row is as long as allowed; "at least" is a lower bound from peak FLOP/s and bandwidths, not a forecast.`;
  for (const p of plan.phases) {
    const m = p.skipped ? null : worst(p);
    const box = make("button", p.skipped ? "step skipped" : "step", make("b", "", p.name), make("span", "", p.skipped ? `skipped: ${p.skipped}` : p.role ? `${p.role} on ${p.pool}` : `CPU on ${p.pool}`));
    if (!p.skipped && p.bound && p.bound.seconds > 0) box.append(make("span", "", `at least ${time(p.bound.seconds)}`));
    if (m) box.append(make("span", "", size(m.peak)), bar(m.peak / plan.card.usable, roleTone(p.role)));
    box.type = "button";
    box.style.setProperty("--tone", roleTone(p.role));
    box.addEventListener("click", () => choosePhase(p));
    p.box = box;
    $("timeline").append(box);
  }
}
function choosePhase(p) {
  phase = p;
  for (const other of plan.phases) other.box.setAttribute("aria-pressed", String(other === p));
  const m = worst(p), left = make("div", "", make("h3", "", `${p.name}: memory of the fullest rank`)), right = make("div", "", make("h3", "", "What one rank takes in"));
  if (m && m.peak) {
    const items = make("div", "items");
    for (const [what, bytes] of Object.entries(m.items).sort((a, b) => b[1] - a[1])) items.append(make("span", "", what), bar(bytes / m.peak, roleTone(what.split(":")[0])), make("span", "", size(bytes)));
    left.append(items, make("p", "note", `${size(m.peak)} of ${size(plan.card.usable)} usable on ${plan.card.name}` + (m.moment ? `; the peak is at: ${m.moment}.` : ".")));
  } else left.append(make("p", "note", p.skipped ? `Skipped: ${p.skipped}.` : "Nothing is held, or the model's shape is unknown."));
  if (p.name === "generate" && Object.keys(plan.vllm).length) {
    const engine = make("table", "");
    fillTable(engine, ["vLLM on one rank", "estimate"], Object.entries(plan.vllm), []);
    left.append(engine);
  }
  const moves = plan.traffic.filter((t) => t.phase === p.name || (p.name === "generate" && t.phase === "weight sync"));
  if (moves.length) {
    const table = make("table", "");
    fillTable(table, ["what", "over", "inside its host", "from other hosts"], moves.map((t) => [t.phase === p.name ? t.what : `weight sync: ${t.what}`, t.groups, size(t.inside), size(t.between)]), [2, 3]);
    right.append(table);
  } else right.append(make("p", "note", "No tensors of the model move between ranks."));
  $("phase").replaceChildren(left, right);
  paint();
}
function fillTable(table, head, rows, numbers) {
  const cell = (tag, text, i) => make(tag, numbers.includes(i) ? "number" : "", text);
  table.append(make("thead", "", make("tr", "", ...head.map((h, i) => cell("th", h, i)))), make("tbody", "", ...rows.map((row) => make("tr", "", ...row.map((x, i) => cell("td", String(x), i))))));
}

// ---- start
const total = plan.model ? `, ${plan.model.name} (${(plan.model.parameters / 1e9).toFixed(2)} B parameters)` : "";
$("summary").textContent = `${plan.experiment}: ${plan.world_size} ranks on ${plan.nodes.length} ${plan.nodes.length === 1 ? "node" : "nodes"} of ${plan.card.name}${total}`;
views.forEach((v, i) => {
  const twins = views.filter((o) => o.label === v.label).length > 1;
  const button = make("button", "", v.label, twins ? make("small", "", v.roles.join(", ")) : null);
  button.type = "button";
  button.dataset.view = i;
  button.addEventListener("click", () => { view = v; paint(); });
  $("views").append(button);
});
const dark = matchMedia("(prefers-color-scheme: dark)");
const setTheme = (name) => { document.documentElement.dataset.theme = name; };
setTheme(dark.matches ? "dark" : "light");
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
fillTable($("groups"), ["name", "groups", "ranks each", "the same as"], plan.process_groups.map((g) => [g.name, g.count, g.size, g.aliases.join(", ")]), [1, 2]);
for (const row of $("groups").querySelectorAll("tbody tr")) row.lastChild.className = "aliases";
drawNodes();
drawTimeline();
choosePhase(plan.phases.find((p) => p.name === "update") || plan.phases[0]);
choose(0);
