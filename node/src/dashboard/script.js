// The dashboard: asks its own process for the state every two seconds, and draws it.

const EVERY_MS = 2000;
const ANSWER_MAX_MS = 4000;
const MOMENTS = 150;
// So many missed moments, and what is shown is called old.
const MISSED_MAX = 3;
const SVG = "http://www.w3.org/2000/svg";

const number = (digits) => {
  const format = new Intl.NumberFormat("en", { maximumFractionDigits: digits });
  return (value) => format.format(value);
};
const whole = number(0);
const tenths = number(1);
const round = (value) => (value < 10 ? tenths(value) : whole(value));
const plain = (unit) => (value) => [round(value), unit];
const share = (value) => [round(value * 100), "%"];
const time = (ms) => (ms < 1000 ? [round(ms), "ms"] : [number(2)(ms / 1000), "s"]);
const bytes = (value) => {
  const units = ["B/s", "KiB/s", "MiB/s", "GiB/s"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return [round(value), units[unit]];
};

// Of each chart: whose history, its columns with their names, how numbers read, and what a missing one means.
const CHARTS = [
  { title: "Throughput", of: "gateway", columns: [["tokens_per_second", ""]], read: plain("tokens/s"), or: ["worker_tokens_per_second", "computed tokens/s"] },
  { title: "Time to first token", of: "gateway", columns: [["ttft_p50_ms", "p50"], ["ttft_p95_ms", "p95"]], read: time },
  { title: "Time between tokens", of: "gateway", columns: [["itl_p50_ms", "p50"], ["itl_p95_ms", "p95"]], read: time },
  { title: "Requests in flight", of: "routers", columns: [["requests", ""]], read: plain(""), sum: true },
  { title: "KV in use", of: "router", columns: [["kv_used", ""]], read: share, top: 1 },
  { title: "Prefix hits", of: "router", columns: [["prefix_hits", ""]], read: share, top: 1 },
  { title: "KV transferred", of: "router", columns: [["transfer_bytes_per_second", ""]], read: bytes },
  { title: "Retries and failed transfers", of: "routers", columns: [["retries", "retries"], ["transfer_failures", "failed"]], read: plain(""), sum: true, total: true },
];

const element = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
};
const drawn = (name, attributes) => {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};
const byId = (id) => document.getElementById(id);
const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
const sumOf = (counts) => Object.values(counts ?? {}).reduce((sum, value) => sum + value, 0);

// What is known: the last answer, when it came, and each router's last overview.
const known = { answer: null, at: 0, error: null, routers: new Map() };

// A gateway's answer has its routers' overviews; a router's is one.
function take(answer) {
  const routers = answer?.routers ?? (answer ? [{ address: "this router", overview: answer, error: null }] : []);
  for (const router of routers) {
    const before = known.routers.get(router.address)?.overview ?? null;
    known.routers.set(router.address, { overview: router.overview ?? before, error: router.error });
  }
  for (const address of known.routers.keys()) {
    if (!routers.some((router) => router.address === address)) known.routers.delete(address);
  }
  known.answer = answer;
  known.at = Date.now();
}

const overviews = () => [...known.routers.values()].map((router) => router.overview).filter(Boolean);
const gateway = () => known.answer?.gateway ?? null;
// The moment of the answer on its own clock: a browser's may differ.
const answeredAt = () => gateway()?.at_ms ?? known.answer?.at_ms ?? 0;

// Several histories as one, aligned at their ends.
function column(histories, name, sum) {
  const columns = histories.map((history) => history.columns[name]).filter(Boolean);
  if (columns.length === 0) return null;
  if (!sum || columns.length === 1) return columns[0];
  const length = Math.max(...columns.map((values) => values.length));
  return Array.from({ length }, (_, index) => {
    const values = columns.map((values) => values[values.length - length + index]).filter((value) => value != null);
    return values.length ? values.reduce((sum, value) => sum + value, 0) : null;
  });
}

function historiesOf(chart) {
  if (chart.of === "gateway") return gateway() ? [gateway().history] : [];
  return overviews().map((overview) => overview.history).slice(0, chart.of === "router" ? 1 : undefined);
}

// ── Charts ──

class Chart {
  constructor(definition) {
    this.definition = definition;
    this.cursor = null;
    this.values = element("div", { class: "values" });
    this.top = element("span", { class: "top", "aria-hidden": "true" });
    this.svg = drawn("svg", { viewBox: `0 0 ${MOMENTS - 1} 100`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.plot = element("div", { class: "plot", tabindex: "0", role: "img" }, this.svg);
    this.readout = element("p", { class: "readout", "aria-live": "polite" });
    this.figure = element("figure", { class: "chart" }, element("div", { class: "title" }, element("h3", {}, definition.title), this.top), this.values, this.plot, this.readout);
    this.plot.addEventListener("pointermove", (event) => {
      const box = this.plot.getBoundingClientRect();
      this.point(Math.round(((event.clientX - box.left) / box.width) * (MOMENTS - 1)));
    });
    this.plot.addEventListener("pointerleave", () => this.point(null));
    this.plot.addEventListener("blur", () => this.point(null));
    this.plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) {
        event.preventDefault();
        this.point((this.cursor ?? MOMENTS) + step);
      } else if (event.key === "Escape") this.point(null);
    });
  }

  point(at) {
    this.cursor = at === null ? null : Math.min(Math.max(at, 0), MOMENTS - 1);
    this.draw();
  }

  // The lines to draw: each has a name and values, the latest last.
  lines() {
    const { columns, sum, or } = this.definition;
    let histories = historiesOf(this.definition);
    if (histories.length === 0 && or) {
      histories = overviews().map((overview) => overview.history).slice(0, 1);
      return [{ name: or[1], values: column(histories, or[0], false) ?? [] }];
    }
    return columns.map(([name, label]) => ({ name: label, values: column(histories, name, sum) ?? [] }));
  }

  draw() {
    const { read, top, total, title, of } = this.definition;
    const lines = this.lines();
    const max = top ?? Math.max(...lines.flatMap((line) => line.values.filter((value) => value != null)), 0);
    const scale = max > 0 ? max * (top ? 1 : 1.08) : 1;
    this.svg.replaceChildren(drawn("line", { x1: 0, x2: MOMENTS - 1, y1: 100, y2: 100 }));
    if (this.cursor !== null) this.svg.append(drawn("line", { class: "cursor", x1: this.cursor, x2: this.cursor, y1: 0, y2: 100 }));
    lines.forEach((line, index) => {
      const path = drawn("path", { d: pathOf(line.values, scale) });
      if (index > 0) path.setAttribute("class", "second");
      this.svg.append(path);
    });
    this.top.textContent = max > 0 ? `${top ? "of" : "up to"} ${read(max).join(" ").trim()}` : "";

    const said = lines.map((line) => {
      const values = line.values.filter((value) => value != null);
      const value = total ? values.reduce((sum, value) => sum + value, 0) : line.values.at(-1);
      return { name: line.name, read: value == null || values.length === 0 ? null : read(value) };
    });
    this.values.replaceChildren(...said.map(({ name, read }, index) => {
      const swatch = lines.length > 1 ? [element("span", { class: index ? "swatch second" : "swatch" })] : [];
      const text = read ? read[0] : "–";
      return element("span", { class: "value" }, ...swatch, text, element("small", {}, ` ${[read?.[1], name].filter(Boolean).join(" ")}`));
    }));
    const empty = lines.every((line) => line.values.every((value) => value == null));
    if (empty) {
      const why = of === "gateway" && !gateway() ? "measured by gateways, on their dashboards" : "nothing yet";
      this.values.replaceChildren(element("span", { class: "none" }, why));
    }
    const last = said.map(({ name, read }) => `${name} ${read ? read.join(" ") : "unknown"}`.trim()).join(", ");
    this.plot.setAttribute("aria-label", `${title}: ${empty ? "no values" : last}. Arrow keys read earlier moments.`);
    this.readout.textContent = this.reading(lines);
  }

  reading(lines) {
    if (this.cursor === null) return this.definition.total ? "sum of five minutes" : "";
    const back = MOMENTS - 1 - this.cursor;
    const parts = lines.map((line) => {
      const value = line.values.at(-1 - back);
      return `${line.name} ${value == null ? "–" : this.definition.read(value).join(" ")}`.trim();
    });
    const ago = (back * EVERY_MS) / 1000;
    return `${ago < 60 ? `${ago} s` : `${Math.floor(ago / 60)} min ${ago % 60} s`} ago: ${parts.join(", ")}`;
  }
}

// Values from the right edge backwards; where one is missing the line breaks.
function pathOf(values, scale) {
  let path = "";
  let open = false;
  const start = MOMENTS - values.length;
  values.forEach((value, index) => {
    if (value == null) {
      open = false;
      return;
    }
    const [x, y] = [start + index, (100 - (value / scale) * 100).toFixed(2)];
    path += open ? `L${x} ${y}` : `M${x} ${y}h0.01`;
    open = true;
  });
  return path;
}

// ── Workers ──

const STATES = ["refused", "lost", "draining", "unknown", "live"];

// The workers as all routers see them: of two views the worse one, and what both have placed.
function workers() {
  const merged = new Map();
  for (const overview of overviews()) {
    for (const worker of overview.workers) {
      const other = merged.get(worker.address);
      if (!other) {
        merged.set(worker.address, worker);
        continue;
      }
      const worse = STATES.indexOf(worker.state) < STATES.indexOf(other.state) ? worker : other;
      merged.set(worker.address, { ...worse, placed: worker.placed + other.placed });
    }
  }
  return [...merged.values()];
}

function blocksOf(worker) {
  const blocks = worker.report?.blocks;
  if (!blocks) return null;
  const { free = 0, cached = 0, used = 0, held = 0 } = blocks;
  return { held: Math.min(held, used), used: Math.max(used - held, 0), cached, free, total: free + cached + used };
}

function kvCell(worker) {
  const blocks = blocksOf(worker);
  if (!blocks || blocks.total === 0) return element("td", { class: "kv" }, "–");
  const parts = ["held", "used", "cached", "free"].map((state) => `${whole(blocks[state])} ${state}`);
  const bar = element("span", { class: "bar", role: "img", "aria-label": `KV blocks: ${parts.join(", ")} of ${whole(blocks.total)}` });
  for (const state of ["held", "used", "cached"]) {
    const part = element("span", { class: state });
    part.style.width = `${(blocks[state] / blocks.total) * 100}%`;
    bar.append(part);
  }
  return element("td", { class: "kv" }, bar, element("span", { class: "blocks", "aria-hidden": "true" }, `${parts.join(" · ")}`));
}

function workerRow(worker, every) {
  const report = worker.report;
  const figure = (label, text) => element("td", { class: "figure", "data-label": label }, text);
  const rate = (value, read) => (value == null ? "–" : read(value).join(" "));
  const sequences = report?.sequences ?? {};
  const isOld = worker.report_age_ms == null || worker.report_age_ms > MISSED_MAX * every;
  const notes = [];
  if (worker.reason) notes.push(worker.reason);
  if (report && isOld) notes.push(`figures ${Math.round(worker.report_age_ms / 1000)} s old`);
  if (!report && worker.state === "live") notes.push("no figures yet");
  const address = element("td", {}, worker.address);
  if (notes.length) address.append(element("span", { class: "sub" }, notes.join(" · ")));
  return element("tr", isOld ? { class: "old" } : {},
    address,
    element("td", {}, element("span", { class: "state", "data-state": worker.state }, worker.state)),
    kvCell(worker),
    figure("Requests", whole(worker.placed)),
    figure("Running", report ? whole((sequences.running ?? 0) + (sequences.reserved ?? 0)) : "–"),
    figure("Waiting", report ? whole((sequences.waiting ?? 0) + (sequences.preempted ?? 0)) : "–"),
    figure("Tokens/s", rate(report?.tokens_per_second, (value) => [round(value)])),
    figure("Busy", rate(report?.busy, share)),
    figure("KV in", rate(report?.bytes_in_per_second, bytes)),
    figure("KV out", rate(report?.bytes_out_per_second, bytes)));
}

const HEADINGS = ["Worker", "State", "KV blocks", "Requests", "Running", "Waiting", "Tokens/s", "Busy", "KV in", "KV out"];

function poolTable(role, pool, every) {
  const live = pool.filter((worker) => worker.state === "live").length;
  const models = [...new Set(pool.map((worker) => worker.model).filter(Boolean))].join(", ");
  const caption = element("caption", {}, `${role[0].toUpperCase()}${role.slice(1)} pool`, element("span", {}, `${live} of ${pool.length} live${models ? ` · ${models}` : ""}`));
  const heads = HEADINGS.map((text, index) => element("th", { scope: "col", class: index === 2 ? "kv" : undefined }, text));
  const table = element("table", {}, caption, element("thead", {}, element("tr", {}, ...heads)),
    element("tbody", {}, ...pool.map((worker) => workerRow(worker, every))));
  return element("div", { class: "scroll" }, table);
}

function drawPools() {
  const all = workers();
  const every = overviews()[0]?.every_ms ?? EVERY_MS;
  const tables = ["prefill", "decode"].map((role) => [role, all.filter((worker) => worker.role === role)])
    .filter(([, pool]) => pool.length)
    .map(([role, pool]) => poolTable(role, pool, every));
  const place = document.querySelector("#pools .tables");
  place.replaceChildren(...(tables.length ? tables : [element("p", { class: "notice" }, "No worker is known.")]));
}

// ── Counts ──

function added(name) {
  const sums = {};
  for (const overview of overviews()) {
    for (const [key, value] of Object.entries(overview[name] ?? {})) sums[key] = (sums[key] ?? 0) + value;
  }
  return sums;
}

function countBox(title, counts, nothing) {
  const rows = Object.entries(counts).filter(([, value]) => value > 0).sort(([, one], [, other]) => other - one);
  const body = rows.length
    ? element("dl", {}, ...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, whole(value))]))
    : element("p", {}, nothing);
  return element("div", { class: "count" }, element("h3", {}, title), body);
}

function drawCounts() {
  const states = added("requests");
  delete states.finished;
  const failures = overviews()[0]?.transfer_failures ?? {};
  byId("counts").replaceChildren(
    countBox("In flight, by state", states, "none"),
    countBox("Ended, by outcome", added("ended"), "none yet"),
    countBox("Replayed attempts, by cause", added("retries"), "none"),
    countBox("Failed transfers, by cause", failures, "none"));
}

// ── Alerts and the header ──

function alerts() {
  const found = new Map();
  const add = (severity, text) => found.set(text, severity);
  if (known.error) add("fault", `This process does not answer since ${clock(known.at)}: what is shown is from then.`);
  if (gateway()?.obstacle) add("fault", `This process takes no requests: ${gateway().obstacle}`);
  if (known.answer?.routers?.length === 0) add("fault", "No router is known.");
  const refused = (gateway()?.history.columns.refused ?? []).slice(-30).reduce((sum, value) => sum + (value ?? 0), 0);
  if (refused > 0) add("warning", `The queue is full: ${whole(refused)} requests were refused in the last minute.`);
  for (const [address, router] of known.routers) {
    if (router.error) {
      const since = router.overview ? `, what is shown of it is from ${clock(router.overview.at_ms)}` : "";
      add("fault", `Router ${address} does not answer${since}: ${router.error}`);
    } else if (router.overview && answeredAt() - router.overview.at_ms > MISSED_MAX * router.overview.every_ms) {
      add("warning", `What router ${address} sees is ${Math.round((answeredAt() - router.overview.at_ms) / 1000)} s old.`);
    }
  }
  for (const overview of overviews()) {
    for (const alert of overview.alerts) add(alert.severity, alert.text);
  }
  return [...found].map(([text, severity]) => ({ text, severity })).sort((one, other) => one.severity.localeCompare(other.severity));
}

function drawAlerts() {
  const all = alerts();
  const list = all.map(({ severity, text }) =>
    element("li", { "data-level": severity }, element("strong", {}, severity === "fault" ? "Fault" : "Warning"), element("span", {}, text)));
  const section = byId("alerts");
  section.querySelector("ul").replaceChildren(...list);
  section.hidden = all.length === 0;
  const verdict = byId("verdict");
  const faults = all.filter((alert) => alert.severity === "fault").length;
  const level = known.answer === null ? "unknown" : faults ? "fault" : all.length ? "warning" : "good";
  const live = workers().filter((worker) => worker.state === "live").length;
  const count = (many, word) => `${many} ${word}${many === 1 ? "" : "s"}`;
  const text = {
    unknown: "Asking…",
    good: `All well · ${count(live, "worker")} live`,
    warning: `${count(all.length, "warning")} · ${count(live, "worker")} live`,
    fault: `${count(faults, "fault")} · ${count(live, "worker")} live`,
  }[level];
  // Said once when it changes, not every two seconds.
  if (verdict.textContent !== text) verdict.textContent = text;
  verdict.dataset.level = level;
  document.title = level === "fault" ? `(${faults}) Baton` : "Baton";
}

function drawFreshness() {
  const age = Math.round((Date.now() - known.at) / 1000);
  document.documentElement.classList.toggle("stale", known.error !== null);
  byId("freshness").textContent = known.at === 0 ? (known.error ?? "")
    : known.error ? `No answer for ${age} s` : age < 4 ? "Live" : `${age} s old`;
}

function drawSources() {
  const routers = [...known.routers.keys()].filter((address) => address !== "this router");
  const seen = routers.length ? `Workers, KV and transfers as router ${routers.join(", ")} sees them` : "Workers, KV and transfers as this router sees them";
  const measured = gateway() ? "latencies and throughput as this gateway measures them" : "latencies are measured by gateways, on their dashboards";
  byId("sources").textContent = `${seen}; ${measured}. Percentiles are of ten seconds.`;
}

const charts = CHARTS.map((definition) => new Chart(definition));
byId("charts").append(...charts.map((chart) => chart.figure));

function draw() {
  drawFreshness();
  drawAlerts();
  if (known.answer === null) return;
  charts.forEach((chart) => chart.draw());
  drawPools();
  drawCounts();
  drawSources();
}

async function ask() {
  try {
    const response = await fetch("/dashboard/state", { signal: AbortSignal.timeout(ANSWER_MAX_MS), cache: "no-store" });
    if (!response.ok) throw new Error(`answered ${response.status}`);
    const answer = await response.json();
    if (answer !== null) take(answer);
    known.error = null;
  } catch (error) {
    known.error = error instanceof Error ? error.message : String(error);
  }
  draw();
}

// One question at a time, and none while nobody looks.
async function run() {
  for (;;) {
    if (!document.hidden) await ask();
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, EVERY_MS);
      document.addEventListener("visibilitychange", () => {
        clearTimeout(timer);
        resolve();
      }, { once: true });
    });
  }
}

// ── Theme ──

const THEMES = ["system", "light", "dark"];

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
}

// Storage may be forbidden: then the choice lasts as long as the page.
let theme = "system";
try {
  theme = THEMES.find((name) => name === localStorage.getItem("baton-theme")) ?? "system";
} catch {}
setTheme(theme);
byId("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  setTheme(theme);
  try {
    localStorage.setItem("baton-theme", theme);
  } catch {}
});

run();
