// The list: drawn from what the server pushes; ticks and the filter survive every redraw.
const body = document.getElementById("runs");
const filter = document.getElementById("filter");
const compare = document.getElementById("compare");
const count = document.getElementById("count");
const more = document.getElementById("more");
const ticked = new Set();
const MOST_ROWS = 2000;
let entries = [];

const seconds = (value) => {
  if (value === null) return "";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} us`;
  if (value < 1) return `${(value * 1e3).toFixed(2)} ms`;
  return value < 600 ? `${value.toFixed(1)} s` : `${(value / 60).toFixed(1)} min`;
};

const ago = (moment) => {
  const passed = Date.now() / 1000 - moment;
  if (passed < 90) return "just now";
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h ago`;
  return new Date(moment * 1000).toLocaleDateString();
};

const link = (kind, name) => `/${kind}/${name.split("/").map(encodeURIComponent).join("/")}`;

function cell(row, content, kind) {
  const place = row.insertCell();
  if (kind) place.className = kind;
  place.append(content);
  return place;
}

function anchor(href, text) {
  const made = document.createElement("a");
  made.href = href;
  made.textContent = text;
  return made;
}

function status(entry) {
  const mark = document.createElement("span");
  mark.className = `status ${entry.status}`;
  mark.textContent = entry.status;
  if (entry.cause) mark.title = entry.cause;
  return mark;
}

function fill(row, entry) {
  const box = document.createElement("input");
  box.type = "checkbox";
  box.checked = ticked.has(entry.name);
  box.disabled = entry.status === "damaged";
  box.setAttribute("aria-label", `compare ${entry.name}`);
  box.addEventListener("change", () => {
    if (box.checked) ticked.add(entry.name);
    else ticked.delete(entry.name);
    showCompare();
  });
  cell(row, box, "tick");
  const target = entry.kind === "study" ? link("report", entry.name) : link("run", entry.name);
  cell(row, entry.status === "damaged" ? entry.name : anchor(target, entry.name));
  cell(row, status(entry));
  if (entry.kind === "study" || entry.status === "damaged") {
    const wide = cell(row, entry.kind === "study" ? `study: ${entry.cause}` : entry.cause, "note");
    wide.colSpan = 7;
  } else {
    cell(row, entry.model);
    cell(row, entry.strategy);
    cell(row, String(entry.workers), "n");
    cell(row, entry.iterations === null ? "" : entry.iterations.toLocaleString("en"), "n");
    cell(row, seconds(entry.iteration_seconds), "n");
    cell(row, entry.accuracy === null ? "" : `${(100 * entry.accuracy).toFixed(1)} %`, "n");
    cell(row, seconds(entry.wall_seconds), "n");
  }
  cell(row, ago(entry.changed));
  cell(row, entry.status === "damaged" ? "" : anchor(link("report", entry.name), "report"));
}

function showCompare() {
  compare.disabled = ticked.size < 2;
  compare.textContent = ticked.size ? `Compare ${ticked.size}` : "Compare";
}

function draw() {
  const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (one) => `${one.name} ${one.model} ${one.strategy} ${one.status} ${one.kind}`.toLowerCase();
  const shown = entries.filter((one) => wanted.every((word) => text(one).includes(word)));
  const rows = document.createDocumentFragment();
  for (const entry of shown.slice(0, MOST_ROWS)) {
    const row = document.createElement("tr");
    row.dataset.name = entry.name;
    fill(row, entry);
    rows.append(row);
  }
  body.replaceChildren(rows);
  const running = entries.filter((one) => one.status === "running").length;
  count.textContent = `${entries.length.toLocaleString("en")} in all, ${running} running`;
  more.hidden = shown.length <= MOST_ROWS;
  more.textContent = `The newest ${MOST_ROWS} of ${shown.length}: filter to see others.`;
}

document.getElementById("bar").addEventListener("submit", (event) => {
  event.preventDefault();
  const query = [...ticked].map((name) => `run=${encodeURIComponent(name)}`).join("&");
  if (ticked.size > 1) window.location.assign(`/compare?${query}`);
});
filter.addEventListener("input", draw);

new EventSource("/stream").addEventListener("message", (event) => {
  entries = JSON.parse(event.data);
  draw();
});
