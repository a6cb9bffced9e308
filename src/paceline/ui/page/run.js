// One run, as it grows: what is pushed is added to what was there, and drawn anew.
const SVG = "http://www.w3.org/2000/svg";
const BOX = { left: 56, right: 12, top: 10, bottom: 34, width: 520, height: 260 };
const MOST_POINTS = 1200;
const PHASES = ["input", "forward", "backward", "exchange", "wait", "update", "evaluate", "checkpoint", "other"];
const name = document.getElementById("name").dataset.name;
const path = name.split("/").map(encodeURIComponent).join("/");
const status = document.getElementById("status");
const standing = document.getElementById("standing");
const curves = { loss: [], seconds: [], accuracy: [] };
document.getElementById("report").href = `/report/${path}`;

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
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
}

const short = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });

// Of so many points, each the mean of a stretch: a long run stays quick to draw.
function thin(points) {
  if (points.length <= MOST_POINTS) return points;
  const kept = [];
  for (let index = 0; index + 1 < points.length; index += 2) {
    const [one, two] = [points[index], points[index + 1]];
    kept.push([two[0], (one[1] + two[1]) / 2]);
  }
  if (points.length % 2) kept.push(points[points.length - 1]);
  return kept;
}

function draw(id) {
  const svg = document.getElementById(id);
  const points = curves[id];
  svg.dataset.points = points.length;
  if (!points.length) return;
  const xs = points.map((point) => point[0]);
  const ys = points.map((point) => point[1]);
  const [left, right] = [Math.min(...xs), Math.max(...xs, Math.min(...xs) + 1)];
  // Times are compared by their height, so theirs begins at zero.
  let [low, high] = [id === "seconds" ? 0 : Math.min(...ys), Math.max(...ys)];
  if (low === high) [low, high] = [low - 0.5 * Math.abs(low || 1), high + 0.5 * Math.abs(high || 1)];
  const px = (x) => BOX.left + ((x - left) / (right - left)) * (BOX.width - BOX.left - BOX.right);
  const py = (y) => BOX.height - BOX.bottom - ((y - low) / (high - low)) * (BOX.height - BOX.top - BOX.bottom);
  const parts = [];
  for (const y of ticks(low, high, 4)) {
    parts.push(make("line", { class: "rule", x1: BOX.left, x2: BOX.width - BOX.right, y1: py(y), y2: py(y) }));
    parts.push(make("text", { x: BOX.left - 8, y: py(y) + 4, "text-anchor": "end" }, short(y)));
  }
  for (const x of ticks(left, right, 5)) {
    parts.push(make("text", { x: px(x), y: BOX.height - 12, "text-anchor": "middle" }, short(x)));
  }
  const route = points.map((point, index) => `${index ? "L" : "M"}${px(point[0]).toFixed(1)} ${py(point[1]).toFixed(1)}`);
  parts.push(make("path", { class: "line", d: route.join("") }));
  const last = points[points.length - 1];
  parts.push(make("circle", { class: "dot", cx: px(last[0]), cy: py(last[1]), r: 3.5 }));
  svg.replaceChildren(...parts);
}

function drawPhases(phases) {
  const total = PHASES.reduce((sum, phase) => sum + (phases[phase] || 0), 0);
  if (!total) return;
  const bar = document.getElementById("phases");
  const legend = document.getElementById("legend");
  bar.replaceChildren();
  legend.replaceChildren();
  for (const phase of PHASES) {
    const share = (phases[phase] || 0) / total;
    if (share < 0.0005) continue;
    const part = document.createElement("span");
    part.className = `k-${phase}`;
    part.style.flexGrow = share;
    part.title = `${phase} ${(100 * share).toFixed(1)} %`;
    bar.append(part);
    const item = document.createElement("li");
    const mark = document.createElement("i");
    mark.className = `k-${phase}`;
    item.append(mark, `${phase} ${(100 * share).toFixed(1)} %`);
    legend.append(item);
  }
}

function add(news) {
  for (const [iteration, loss, spent] of news.points || []) {
    if (curves.loss.length && iteration <= curves.loss[curves.loss.length - 1][0]) {
      // A resumed run does some iterations again.
      for (const id of ["loss", "seconds"]) curves[id] = curves[id].filter((point) => point[0] < iteration);
    }
    if (loss !== null) curves.loss.push([iteration, loss]);
    curves.seconds.push([iteration, spent * 1000]);
  }
  for (const [iteration, accuracy] of news.evaluations || []) {
    if (accuracy !== null) curves.accuracy.push([iteration, 100 * accuracy]);
  }
  for (const id of Object.keys(curves)) {
    curves[id] = thin(curves[id]);
    draw(id);
  }
  if (news.phases) drawPhases(news.phases);
  const last = curves.seconds[curves.seconds.length - 1];
  if (last) standing.textContent = `iteration ${last[0].toLocaleString("en")}`;
  show(news.end ? news.end.status : "running", news.end && news.end.cause);
}

function show(text, cause) {
  status.textContent = text;
  status.className = `status ${text}`;
  if (cause) standing.textContent += `: ${cause}`;
}

const source = new EventSource(`/stream/${path}`);
source.addEventListener("message", (event) => add(JSON.parse(event.data)));
source.addEventListener("over", () => {
  source.close();
  if (status.textContent === "running" || status.textContent === "connecting") show("interrupted");
});
source.addEventListener("error", () => {
  if (source.readyState === EventSource.CLOSED) show("no connection");
});
