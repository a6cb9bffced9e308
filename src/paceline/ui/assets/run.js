// One run: adds pushed updates to the curves and redraws them.
const SVG = "http://www.w3.org/2000/svg";
const BOX = { left: 50, right: 466, top: 12, bottom: 214 };
const MAX_POINTS = 1200;
const RECENT_POINTS = 50;
const PHASES = ["input", "forward", "backward", "update", "exchange", "wait", "evaluate", "checkpoint", "other"];
const heading = document.getElementById("name");
const { name } = heading.dataset;
const total = Number(heading.dataset.total) || null;
const path = name.split("/").map(encodeURIComponent).join("/");
const status = document.getElementById("status");
const standing = document.getElementById("standing");
const progress = document.getElementById("progress");
const cause = document.getElementById("cause");
const curves = { loss: [], seconds: [], test: [] };
const evaluations = []; // Iteration, and figures of the test set by name, in their order.
const figure = document.getElementById("figure");
const phases = new Map(); // Worker -> seconds by phase.
document.getElementById("report").href = `/report/${path}`;
// What a profiled script evaluates is not known.
const isProfile = heading.dataset.kind === "profile";
let postMortemTitle = "";
document.getElementById("of-test").hidden = isProfile;

function make(kind, attributes, text) {
  const node = document.createElementNS(SVG, kind);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function ticks(low, high, count) {
  const rough = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((one) => one >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step + 0);
  const digits = Math.max(0, Math.min(6, 1 - Math.floor(Math.log10(step) + 1e-9) - (step / power === 2.5 ? 0 : 1)));
  return found.map((value) => [value, value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })]);
}

// Averages pairs of points, so that a long run stays fast to draw.
function thin(points) {
  if (points.length <= MAX_POINTS) return points;
  const kept = [];
  for (let index = 0; index + 1 < points.length; index += 2) {
    const [one, two] = [points[index], points[index + 1]];
    kept.push([two[0], (one[1] + two[1]) / 2]);
  }
  if (points.length % 2) kept.push(points[points.length - 1]);
  return kept;
}

// Upper limit that ignores outliers: a few slow iterations must not flatten the curve.
function top(values) {
  const most = Math.max(...values);
  const usual = [...values].sort((a, b) => a - b)[Math.floor(0.98 * (values.length - 1))];
  return most > 3 * usual ? 1.6 * usual : most;
}

function limits(id, values) {
  // Step times are compared by height, so their axis starts at zero.
  let [low, high] = [id === "seconds" ? 0 : Math.min(...values), id === "seconds" ? top(values) : Math.max(...values)];
  if (low === high) [low, high] = [low - 0.5 * Math.abs(low || 1), high + 0.5 * Math.abs(high || 1)];
  const air = 0.05 * (high - low);
  return [id === "seconds" ? 0 : low - air, high + air];
}

function draw(id) {
  const svg = document.getElementById(id);
  const points = curves[id];
  svg.dataset.points = points.length;
  if (!points.length) {
    svg.replaceChildren(make("text", { x: 240, y: 125, "text-anchor": "middle", class: "tick" }, "no data yet"));
    return;
  }
  const [left, right] = [0, Math.max(1, points[points.length - 1][0])];
  const [low, high] = limits(id, points.map((point) => point[1]));
  const px = (x) => BOX.left + ((x - left) / (right - left)) * (BOX.right - BOX.left);
  const py = (y) => Math.max(BOX.top, BOX.bottom - ((y - low) / (high - low)) * (BOX.bottom - BOX.top));
  const parts = [];
  for (const [y, text] of ticks(low, high, 4)) {
    parts.push(make("line", { class: "grid", x1: BOX.left, x2: BOX.right, y1: py(y), y2: py(y) }));
    parts.push(make("text", { class: "tick", x: BOX.left - 7, y: py(y) + 4, "text-anchor": "end" }, text));
  }
  parts.push(make("line", { class: "axis", x1: BOX.left, x2: BOX.right, y1: BOX.bottom, y2: BOX.bottom }));
  for (const [x, text] of ticks(left, right, 5)) {
    parts.push(make("line", { class: "axis", x1: px(x), x2: px(x), y1: BOX.bottom, y2: BOX.bottom + 4 }));
    parts.push(make("text", { class: "tick", x: px(x), y: BOX.bottom + 18, "text-anchor": "middle" }, text));
  }
  parts.push(make("text", { class: "axis-label", x: BOX.right, y: BOX.bottom + 38, "text-anchor": "end" }, "iteration"));
  const route = points.map(([x, y], index) => `${index ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`);
  const last = points[points.length - 1];
  const series = make("g", { class: "s0" });
  series.append(
    make("path", { class: "line", d: route.join("") }),
    ...(id === "test" ? points : [last]).map(([x, y]) => make("circle", { class: "dot", cx: px(x), cy: py(y), r: 3.5 })),
  );
  svg.replaceChildren(...parts, series);
}

const sum = (values) => values.reduce((so, one) => so + one, 0);
const percent = (share) => `${(100 * share).toFixed(1)}%`;

function element(kind, className, ...inside) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  made.append(...inside);
  return made;
}

function drawPhases() {
  const workers = [...phases.entries()].sort((a, b) => a[0] - b[0]);
  const bars = [];
  for (const [rank, spent] of workers) {
    const bar = element("div", "bar-of-phases");
    const seconds = sum(Object.values(spent));
    for (const phase of PHASES) {
      const part = element("span", `k-${phase}`);
      const share = (spent[phase] || 0) / seconds;
      // Percentages, because flex items fill the bar only if their factors add up to 1 or more.
      part.style.flexGrow = 100 * share;
      part.title = `${phase} ${percent(share)}`;
      if (spent[phase]) bar.append(part);
    }
    bars.push(element("p", "worker", `worker ${rank}`), bar);
  }
  document.getElementById("phases").replaceChildren(...bars);
  const whose = workers.length > 1 ? `all ${workers.length} workers` : "worker 0";
  // Ranks of a script are compared only in its report.
  const exchange = isProfile ? "; exchange includes wait" : "";
  document.getElementById("whose").textContent = `training, without startup; shares of ${whose}${exchange}`;
  const whole = sum(workers.flatMap(([, spent]) => Object.values(spent)));
  const keys = PHASES.map((phase) => [phase, sum(workers.map(([, spent]) => spent[phase] || 0)) / whole])
    .filter(([, share]) => share >= 0.0005)
    .map(([phase, share]) => element("li", "", element("i", `k-${phase}`), phase, element("b", "", percent(share))));
  document.getElementById("legend").replaceChildren(...keys);
}

// Findings: each with whether it is a fault. Text in backticks is code.
function drawFound(id, title, items) {
  const section = document.getElementById(id);
  section.hidden = !items.length;
  const rows = items.map(([text, kind]) =>
    element("li", kind, ...text.split("`").map((part, index) => (index % 2 ? element("code", "", part) : part))),
  );
  section.replaceChildren(element("h2", "", title), element("ul", "", ...rows));
}

const clock = (left) => `${Math.floor(left / 60)}:${String(Math.round(left) % 60).padStart(2, "0")}`;

// Three significant digits without an exponent.
function duration(milliseconds) {
  const [value, unit] = milliseconds < 999.5 ? [milliseconds, "ms"] : [milliseconds / 1000, "s"];
  const digits = { minimumSignificantDigits: 3, maximumSignificantDigits: 3 };
  return `${value.toLocaleString("en", digits)} ${unit}`;
}

function drawStanding(isRunning) {
  const times = curves.seconds;
  const last = times[times.length - 1];
  if (!last) return;
  const begin = Math.max(0, times.length - RECENT_POINTS);
  const start = begin ? times[begin - 1][0] : times[0][0] - 1;
  // A downsampled point counts for all iterations of its interval.
  const spent = times.slice(begin).map(([at, one], index) => (at - (index ? times[begin + index - 1][0] : start)) * one);
  const count = last[0] - start;
  const each = sum(spent) / count;
  const parts = [`iteration ${last[0].toLocaleString("en")}${total ? ` of ${total.toLocaleString("en")}` : ""}`];
  parts.push(`${duration(each)} per step (mean of the last ${count.toLocaleString("en")})`);
  if (isRunning && total > last[0]) parts.push(`about ${clock(((total - last[0]) * each) / 1000)} left`);
  standing.textContent = parts.join(" · ");
  progress.hidden = !isRunning || !total;
  if (total) Object.assign(progress, { max: total, value: last[0] });
}

function add(update) {
  for (const [iteration, loss, spent] of update.points || []) {
    const { seconds } = curves;
    if (seconds.length && iteration <= seconds[seconds.length - 1][0]) {
      // A resumed run repeats some iterations.
      for (const id of ["loss", "seconds"]) curves[id] = curves[id].filter((point) => point[0] < iteration);
    }
    if (loss !== null) curves.loss.push([iteration, loss]);
    if (spent !== null) curves.seconds.push([iteration, spent * 1000]);
  }
  for (const [iteration, figures] of update.evaluations || []) {
    // A resumed run repeats some evaluations.
    while (evaluations.length && evaluations[evaluations.length - 1][0] >= iteration) evaluations.pop();
    evaluations.push([iteration, figures]);
  }
  if (update.evaluations) offerFigures();
  for (const id of Object.keys(curves)) {
    curves[id] = thin(curves[id]);
    draw(id);
  }
  for (const [rank, spent] of Object.entries(update.phases || {})) phases.set(Number(rank), spent);
  if (phases.size) drawPhases();
  if (update.findings) drawFound("findings", "Findings", update.findings.map(([text, isFault]) => [text, isFault ? "fault" : ""]));
  postMortemTitle = update.post_mortem_title ?? postMortemTitle;
  if (update.post_mortems) {
    const lines = update.post_mortems.flatMap(([first, ...rest]) => [[first, "fault"], ...rest.map((text) => [text, ""])]);
    drawFound("post-mortems", postMortemTitle, lines);
  }
  show("running");
}

// The curve of the test set shows the accuracy at first, or else the loss.
function offerFigures() {
  const names = Object.keys(Object.assign({}, ...evaluations.map(([, figures]) => figures)));
  if (names.join() !== [...figure.options].map((one) => one.value).join()) {
    const chosen = names.includes(figure.value) ? figure.value : names.find((name) => name === "accuracy") || "loss";
    figure.replaceChildren(...names.map((name) => new Option(name.replaceAll("_", " "), name, false, name === chosen)));
  }
  drawFigure();
}

function drawFigure() {
  const isShare = figure.value === "accuracy";
  document.getElementById("unit").textContent = isShare ? "in %" : "";
  curves.test = evaluations
    .filter(([, figures]) => figure.value in figures)
    .map(([iteration, figures]) => [iteration, (isShare ? 100 : 1) * figures[figure.value]]);
  draw("test");
}

figure.addEventListener("change", drawFigure);

function show(text, why) {
  status.textContent = text;
  status.className = `status ${text}`;
  drawStanding(text === "running");
  cause.hidden = !why;
  cause.textContent = why || "";
}

for (const id of Object.keys(curves)) draw(id);
let source = null;

// A hidden page closes its connection: browsers allow six per server.
function listen() {
  source?.close();
  if (document.hidden) return;
  source = new EventSource(`/stream/${path}`);
  source.addEventListener("message", (event) => add(JSON.parse(event.data)));
  source.addEventListener("over", (event) => {
    source.close();
    document.removeEventListener("visibilitychange", listen);
    const outcome = JSON.parse(event.data);
    show(outcome.status, outcome.cause);
  });
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED) show("no connection");
  });
}

document.addEventListener("visibilitychange", listen);
listen();
