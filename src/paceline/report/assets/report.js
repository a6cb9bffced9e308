"use strict";
// Readouts under the pointer, legends that hide and show, and a closer look by dragging.
// The page is complete without this file: everything here is read from data attributes.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const numbers = (text) => (text ? text.split(",").map(Number) : []);
  const make = (name, attributes) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };

  function readoutOf(canvas) {
    let box = canvas.querySelector(".readout");
    if (!box) {
      box = document.createElement("div");
      box.className = "readout";
      box.hidden = true;
      canvas.append(box);
    }
    return box;
  }

  function showAt(box, canvas, event, lines) {
    box.replaceChildren(...lines);
    box.hidden = false;
    const frame = canvas.getBoundingClientRect();
    const x = event.clientX - frame.left + canvas.scrollLeft;
    const y = event.clientY - frame.top;
    const room = canvas.scrollLeft + frame.width;
    const left = x + 16 + box.offsetWidth > room ? x - box.offsetWidth - 12 : x + 16;
    box.style.left = `${Math.max(0, left)}px`;
    box.style.top = `${Math.max(0, y - box.offsetHeight - 10)}px`;
  }

  function line(text, colour) {
    const row = document.createElement(colour ? "div" : "b");
    if (colour) {
      const mark = document.createElement("i");
      mark.style.background = colour;
      row.append(mark);
    }
    row.append(text);
    return row;
  }

  const short = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
    return value.toLocaleString("en", { maximumSignificantDigits: 5 });
  };

  function niceStep(low, high) {
    const rough = (high - low) / 5;
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= rough * 0.999);
  }

  function niceTicks(low, high) {
    const step = niceStep(low, high);
    const ticks = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++) ticks.push(n * step + 0);
    return ticks;
  }

  // 1, 2 and 5 times powers of ten; linear steps where fewer than two of these are visible.
  function logTicks(low, high) {
    const ticks = [];
    for (let n = Math.floor(Math.log10(low)); n <= Math.log10(high); n++) {
      ticks.push(...[1, 2, 5].map((f) => f * 10 ** n).filter((t) => t >= low && t <= high));
    }
    return ticks.length > 1 ? ticks : niceTicks(low, high);
  }

  // To one digit more than the labels of an axis with these limits need to be told apart.
  function reading(value, [low, high], factor) {
    const step = niceStep(low, high) / factor;
    const digits = Math.max(0, 1 - Math.floor(Math.log10(step) + 1e-9));
    if (digits > 5 || Math.abs(value / factor) >= 1e6) return short(value / factor);
    return (value / factor).toLocaleString("en", { maximumFractionDigits: digits });
  }

  class Lines {
    constructor(svg) {
      this.svg = svg;
      this.canvas = svg.closest(".canvas");
      [this.left, this.top, this.width, this.height] = numbers(svg.dataset.box);
      this.whole = { x: numbers(svg.dataset.xLimits), y: numbers(svg.dataset.yLimits) };
      this.view = this.whole;
      this.isLog = { x: "xLog" in svg.dataset, y: "yLog" in svg.dataset };
      this.plot = svg.querySelector(".plot");
      this.series = [...svg.querySelectorAll(".series")].map((group) => ({
        group,
        x: numbers(group.dataset.x),
        y: numbers(group.dataset.y),
        low: numbers(group.dataset.low),
        high: numbers(group.dataset.high),
      }));
      this.plot.prepend(
        make("rect", { x: this.left, y: this.top, width: this.width, height: this.height, fill: "transparent" }),
      );
      this.plot.addEventListener("pointermove", (event) => this.move(event));
      this.plot.addEventListener("pointerleave", () => this.leave());
      this.plot.addEventListener("pointerdown", (event) => this.press(event));
      this.plot.addEventListener("pointerup", (event) => this.release(event));
      this.plot.addEventListener("dblclick", () => this.look(this.whole));
      this.reset = document.createElement("button");
      Object.assign(this.reset, { type: "button", className: "reset", textContent: "reset zoom", hidden: true });
      this.reset.addEventListener("click", () => this.look(this.whole));
      this.canvas.append(this.reset);
    }

    visible() {
      return this.series.filter((one) => !one.group.classList.contains("off"));
    }

    valueAt(event) {
      const point = new DOMPoint(event.clientX, event.clientY);
      const place = point.matrixTransform(this.svg.getScreenCTM().inverse());
      const share = Math.min(1, Math.max(0, (place.x - this.left) / this.width));
      const [low, high] = this.view.x;
      return this.isLog.x ? low * (high / low) ** share : low + share * (high - low);
    }

    // Where a value is between the limits of an axis, from 0 to 1.
    share(axis, value) {
      const to = this.isLog[axis] ? (number) => Math.log(Math.max(number, 1e-300)) : (number) => number;
      const [low, high] = this.view[axis].map(to);
      return (to(value) - low) / (high - low);
    }

    px(value) {
      return this.left + this.share("x", value) * this.width;
    }

    py(value) {
      return this.top + this.height * (1 - this.share("y", value));
    }

    ticks(axis) {
      return (this.isLog[axis] ? logTicks : niceTicks)(...this.view[axis]);
    }

    move(event) {
      const value = this.valueAt(event);
      if (this.start !== undefined) {
        this.choose(this.start, value);
        return;
      }
      const data = this.svg.dataset;
      const found = this.visible()
        .filter((one) => one.x.length)
        .map((one) => {
          let best = 0;
          one.x.forEach((x, index) => {
            if (Math.abs(x - value) < Math.abs(one.x[best] - value)) best = index;
          });
          return { one, best, x: one.x[best], y: one.y[best] };
        });
      if (!found.length) return;
      const nearest = found.reduce((a, b) => (Math.abs(a.x - value) <= Math.abs(b.x - value) ? a : b));
      const rows = [line(`${data.xLabel} ${reading(nearest.x, this.view.x, data.xFactor)} ${data.xUnit}`)];
      const told = (y) => reading(y, this.view.y, data.yFactor);
      for (const { one, best, y } of found.slice(0, 12)) {
        let text = `${one.group.dataset.label}: ${told(y)} ${data.yUnit}`;
        if (one.low.length) {
          text += ` (${told(one.low[best])} to ${told(one.high[best])})`;
        }
        rows.push(line(text, getComputedStyle(one.group.querySelector(".line")).stroke));
      }
      this.rule ??= this.svg.appendChild(make("line", { class: "rule" }));
      const x = this.px(nearest.x);
      for (const [key, spot] of [["x1", x], ["x2", x], ["y1", this.top], ["y2", this.top + this.height]]) {
        this.rule.setAttribute(key, spot);
      }
      showAt(readoutOf(this.canvas), this.canvas, event, rows);
    }

    leave() {
      this.unread();
      this.unchoose();
    }

    unread() {
      readoutOf(this.canvas).hidden = true;
      this.rule?.remove();
      this.rule = undefined;
    }

    press(event) {
      if (event.button === 0 && event.pointerType !== "touch") {
        this.start = this.valueAt(event);
        this.unread();
      }
    }

    choose(from, to) {
      this.choice ??= this.svg.appendChild(make("rect", { class: "chosen", y: this.top, height: this.height }));
      const [a, b] = [this.px(from), this.px(to)].sort((p, q) => p - q);
      this.choice.setAttribute("x", a);
      this.choice.setAttribute("width", b - a);
    }

    unchoose() {
      this.choice?.remove();
      this.choice = this.start = undefined;
    }

    release(event) {
      if (this.start === undefined) return;
      const x = [this.start, this.valueAt(event)].sort((a, b) => a - b);
      this.unchoose();
      if (this.share("x", x[1]) - this.share("x", x[0]) < 0.02) return;
      const inside = this.visible().flatMap((one) =>
        one.x.flatMap((value, index) =>
          value >= x[0] && value <= x[1]
            ? [one.y[index], ...(one.low.length ? [one.low[index], one.high[index]] : [])]
            : [],
        ),
      );
      if (!inside.length) return;
      const [low, high] = [Math.min(...inside), Math.max(...inside)];
      if (this.isLog.y) {
        const factor = (high / low) ** 0.05 * 1.01;
        this.look({ x, y: [low / factor, high * factor] });
        return;
      }
      const air = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
      this.look({ x, y: [low - air, high + air] });
    }

    look(view) {
      this.view = view;
      this.reset.hidden = view === this.whole;
      this.unread();
      for (const one of this.series) {
        const at = (values) => one.x.map((x, index) => `${this.px(x)},${this.py(values[index])}`);
        one.group.querySelector(".line")?.setAttribute("points", at(one.y).join(" "));
        one.group.querySelector(".band")?.setAttribute("points", [...at(one.high), ...at(one.low).reverse()].join(" "));
        one.group.querySelectorAll(".dot").forEach((dot) => {
          dot.setAttribute("cx", this.px(one.x[dot.dataset.at]));
          dot.setAttribute("cy", this.py(one.y[dot.dataset.at]));
        });
        one.group.querySelectorAll(".whisker").forEach((mark, index) => {
          mark.setAttribute("x1", this.px(one.x[index]));
          mark.setAttribute("x2", this.px(one.x[index]));
          mark.setAttribute("y1", this.py(one.high[index]));
          mark.setAttribute("y2", this.py(one.low[index]));
        });
      }
      this.axes();
    }

    axes() {
      const data = this.svg.dataset;
      const y = this.svg.querySelector(".y-axis");
      const x = this.svg.querySelector(".x-axis");
      const label = (text, attributes) => {
        const node = make("text", { class: "tick", ...attributes });
        node.textContent = text;
        return node;
      };
      // The label of a logarithmic axis has no unit, so its ticks do.
      const text = (tick, axis) => {
        const [factor, unit] = [data[`${axis}Factor`], data[`${axis}Unit`]];
        return this.isLog[axis] && unit ? `${short(tick / factor)} ${unit}` : short(tick / factor);
      };
      const bottom = this.top + this.height;
      const right = this.left + this.width;
      y.replaceChildren(
        ...this.ticks("y").flatMap((tick) => [
          make("line", { class: "grid", x1: this.left, x2: right, y1: this.py(tick), y2: this.py(tick) }),
          label(text(tick, "y"), { x: this.left - 7, y: this.py(tick) + 4, "text-anchor": "end" }),
        ]),
      );
      x.replaceChildren(
        make("line", { class: "axis", x1: this.left, x2: right, y1: bottom, y2: bottom }),
        ...this.ticks("x").flatMap((tick) => [
          make("line", { class: "axis", x1: this.px(tick), x2: this.px(tick), y1: bottom, y2: bottom + 4 }),
          label(text(tick, "x"), { x: this.px(tick), y: bottom + 18, "text-anchor": "middle" }),
        ]),
      );
    }
  }

  function toggles(svg) {
    const kinds = svg.classList.contains("lines");
    svg.querySelectorAll(".key").forEach((key) => {
      const name = key.querySelector("title").textContent;
      const flip = () => {
        const off = key.classList.toggle("faint");
        key.setAttribute("aria-pressed", String(!off));
        const marks = kinds
          ? svg.querySelectorAll(`.series[data-series="${key.dataset.series}"]`)
          : svg.querySelectorAll(`.part[data-kind="${CSS.escape(name)}"]`);
        marks.forEach((mark) => mark.classList.toggle("off", off));
      };
      key.setAttribute("role", "button");
      key.setAttribute("aria-pressed", "true");
      key.addEventListener("click", flip);
      key.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          flip();
        }
      });
    });
  }

  function parts(svg) {
    const canvas = svg.closest(".canvas");
    svg.querySelectorAll(".part").forEach((part) => {
      // The readout says it sooner and better.
      part.querySelector("title")?.remove();
      part.addEventListener("pointermove", (event) => {
        const { label, kind, text } = part.dataset;
        showAt(readoutOf(canvas), canvas, event, [
          line(label),
          line(`${kind} ${text}`, getComputedStyle(part).fill),
        ]);
      });
      part.addEventListener("pointerleave", () => {
        readoutOf(canvas).hidden = true;
      });
    });
  }

  const style = document.querySelector("style").textContent;
  const chartStyle = style.slice(style.indexOf(".chart { --ink"));
  document.querySelectorAll("svg.chart").forEach((svg) => {
    // As it came, before anything is changed by looking at it.
    const copy = svg.cloneNode(true);
    if (svg.classList.contains("lines")) new Lines(svg);
    parts(svg);
    toggles(svg);
    const link = svg.closest("figure")?.querySelector(".download");
    link?.addEventListener("click", () => {
      const rules = make("style", {});
      rules.textContent = chartStyle;
      const alone = copy.cloneNode(true);
      alone.prepend(rules);
      const text = new XMLSerializer().serializeToString(alone);
      link.href = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    });
  });
})();
