const COLOURS = ["#2563eb", "#ea580c", "#059669", "#c026d3", "#ca8a04", "#0891b2", "#dc2626", "#6d28d9"];
const view = { smoothing: 0.6, axis: "step", log: false, hidden: new Set(), hover: null, units: {} };
const charts = [];

const byId = (id) => document.getElementById(id);
const colourOf = (run) => COLOURS[run % COLOURS.length];

/** An element with properties and children; texts become text nodes, so nothing in them is read as HTML. */
function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("aria-") || name.startsWith("data-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function show(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (size >= 0.001 && size < 1000) return value.toFixed(size < 10 ? 3 : 1);
  if (size >= 1000 && size < 1e9) return Math.round(value).toLocaleString("en");
  return value.toExponential(2);
}

function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/** The exponential moving average without bias towards zero. */
function smoothed(values, weight) {
  let total = 0, norm = 0;
  return values.map((value) => {
    total = weight * total + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return total / norm;
  });
}

/** Round numbers from low to high, about `count` of them. */
function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= raw);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function tickText(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
  return size < 1e-3 ? value.toExponential(1).replace(".0e", "e") : String(+value.toPrecision(4));
}

const quantile = (sorted, part) => sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))];

/** One metric of all runs over each other. */
class Chart {
  constructor(runs, metric, title, explanation = "") {
    this.runs = runs;
    this.metric = metric;
    this.sparse = metric.startsWith("eval/");
    this.base = make("canvas", { role: "img" });
    this.base.setAttribute("aria-label", `${title || metric} of ${runs.length} runs`);
    this.over = make("canvas");
    this.plot = make("div", { className: "plot" }, this.base, this.over);
    const save = make("button", { type: "button", title: "Save as PNG", textContent: "⤓" });
    save.setAttribute("aria-label", `Save ${metric} as PNG`);
    save.onclick = () => this.save();
    const caption = make("figcaption", {}, make("b", { textContent: title || metric }),
      make("span", { className: "name", textContent: title && title !== metric ? metric : "" }), save);
    this.figure = make("figure", { "data-metric": metric }, caption,
      explanation ? make("p", { className: "quiet explanation", textContent: explanation }) : null, this.plot);
    this.plot.onpointermove = this.plot.onpointerdown = (event) => this.hover(event);
    this.plot.onpointerleave = () => { view.hover = null; byId("tip").hidden = true; drawHovers(); };
    // A tap shows the tooltip, and stays where it is.
    this.plot.onclick = (event) => event.pointerType !== "touch" && view.hover !== null && this.nearestStep() !== null && showStep(this.nearestStep(), this.sparse);
    this.visible = false;
    charts.push(this);
    watcher.observe(this.figure);
  }

  /** {run, xs, ys, steps} of each run that is shown and has the metric. */
  series() {
    return this.runs.map((run, number) => ({ run, number })).filter(({ run, number }) => !view.hidden.has(number) && run.metrics[this.metric])
      .map(({ run, number }) => {
        const xs = [], ys = [], steps = [];
        run.metrics[this.metric].forEach((value, i) => {
          const x = run.axes[view.axis][i];
          if (value === null || x === null || (view.log && value <= 0)) return;
          xs.push(x); steps.push(run.steps[i]); ys.push(view.log ? Math.log10(value) : value);
        });
        return { run, number, xs, ys, steps, smooth: this.sparse || !view.smoothing ? ys : smoothed(ys, view.smoothing) };
      }).filter((one) => one.xs.length);
  }

  draw() {
    if (!this.visible) return;
    const { clientWidth: width, clientHeight: height } = this.plot;
    const scale = window.devicePixelRatio || 1;
    for (const canvas of [this.base, this.over]) { canvas.width = width * scale; canvas.height = height * scale; }
    const pen = this.base.getContext("2d");
    pen.scale(scale, scale);
    this.drawn = this.series();
    this.bounds(width, height);
    this.axes(pen, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 4, width - this.left - 4, height - 24);
    pen.clip();
    for (const one of this.drawn) {
      if (one.smooth !== one.ys) this.line(pen, one.xs, one.ys, colourOf(one.number), 0.22, 1);
      this.line(pen, one.xs, one.smooth, colourOf(one.number), 1, 1.7);
      if (this.sparse || one.xs.length === 1) this.dots(pen, one);
    }
    pen.restore();
    this.drawHover();
  }

  bounds(width, height) {
    let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
    for (const one of this.drawn) {
      const sorted = [...one.ys].sort((a, b) => a - b);
      const cut = one.smooth === one.ys ? 0 : 0.02;
      for (const y of one.smooth) { low = Math.min(low, y); high = Math.max(high, y); }
      low = Math.min(low, quantile(sorted, cut)); high = Math.max(high, quantile(sorted, 1 - cut));
      first = Math.min(first, one.xs[0]); last = Math.max(last, one.xs[one.xs.length - 1]);
    }
    if (!this.drawn.length) [low, high, first, last] = [0, 1, 0, 1];
    if (high - low < 1e-12 * Math.max(1, Math.abs(high))) { const room = Math.abs(high) * 0.1; low -= room; high += room || 1; }
    if (last === first) last = first + 1;
    const room = (high - low) * 0.05;
    low -= room; high += room;
    this.left = 46;
    this.low = low; this.high = high; this.first = first; this.last = last;
    this.x = (x) => this.left + (x - first) / (last - first) * (width - this.left - 8);
    this.y = (y) => 4 + (high - y) / (high - low) * (height - 28);
  }

  axes(pen, width, height) {
    const style = getComputedStyle(document.documentElement);
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = style.getPropertyValue("--quiet");
    pen.strokeStyle = style.getPropertyValue("--line");
    pen.textAlign = "right"; pen.textBaseline = "middle";
    for (const y of ticks(this.low, this.high, 6)) {
      pen.beginPath(); pen.moveTo(this.left, this.y(y)); pen.lineTo(width - 4, this.y(y)); pen.stroke();
      pen.fillText(view.log ? tickText(10 ** y) : tickText(y), this.left - 6, this.y(y));
    }
    pen.textBaseline = "alphabetic"; pen.textAlign = "center";
    for (const x of ticks(this.first, this.last, Math.max(2, Math.floor(width / 90)))) pen.fillText(tickText(x), Math.min(this.x(x), width - 12), height - 6);
    if (!this.drawn.length) pen.fillText("no values", width / 2, height / 2);
  }

  line(pen, xs, ys, colour, alpha, width) {
    pen.globalAlpha = alpha; pen.strokeStyle = colour; pen.lineWidth = width; pen.lineJoin = "round";
    pen.beginPath();
    xs.forEach((x, i) => (i ? pen.lineTo(this.x(x), this.y(ys[i])) : pen.moveTo(this.x(x), this.y(ys[i]))));
    pen.stroke();
    pen.globalAlpha = 1;
  }

  dots(pen, one) {
    pen.fillStyle = colourOf(one.number);
    one.xs.forEach((x, i) => { pen.beginPath(); pen.arc(this.x(x), this.y(one.smooth[i]), 3, 0, 7); pen.fill(); });
  }

  hover(event) {
    const box = this.plot.getBoundingClientRect();
    view.hover = this.first + (event.clientX - box.left - this.left) / (box.width - this.left - 8) * (this.last - this.first);
    drawHovers();
    const tip = byId("tip"), unit = view.units[this.metric], plain = (y) => show(view.log ? 10 ** y : y);
    tip.replaceChildren(make("div", { className: "quiet", textContent: unit ? `${this.metric}, ${unit}` : this.metric }));
    for (const one of this.drawn) {
      const i = this.point(one), last = one.steps.length - 1;
      const smooth = i !== null && one.smooth !== one.ys ? ` (smoothed ${plain(one.smooth[i])})` : "";
      const step = i !== null ? `step ${show(one.steps[i])}` : `none: it ${view.hover > one.xs[last] ? `ended at step ${show(one.steps[last])}` : `began at step ${show(one.steps[0])}`}`;
      tip.append(make("div", {}, dot(one.number), one.run.name, make("span", { className: "quiet", textContent: step }),
        i === null ? null : make("span", { className: "value", textContent: plain(one.ys[i]) }), make("span", { className: "quiet", textContent: smooth })));
    }
    tip.hidden = !this.drawn.length;
    const left = event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - tip.offsetWidth - 12 : event.clientX + 16;
    Object.assign(tip.style, { left: `${Math.max(8, left)}px`, top: `${Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8)}px` });
  }

  /** The index of a run's point under the cursor; null where the run has none there: it began later, or has ended. */
  point(one) {
    const i = nearest(one.xs, view.hover), last = one.xs.length - 1;
    const gap = Math.max(last ? (one.xs[last] - one.xs[0]) / last : 0, (this.last - this.first) / 40);
    return Math.abs(one.xs[i] - view.hover) > gap && (view.hover < one.xs[0] || view.hover > one.xs[last]) ? null : i;
  }

  /** The step of the first run that has a point under the cursor. */
  nearestStep() {
    const one = this.drawn.find((run) => this.point(run) !== null);
    return one ? one.steps[this.point(one)] : null;
  }

  drawHover() {
    if (!this.visible || !this.drawn) return;
    const pen = this.over.getContext("2d"), scale = window.devicePixelRatio || 1;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, this.over.width, this.over.height);
    if (view.hover === null || view.hover < this.first || view.hover > this.last) return;
    pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--quiet");
    pen.setLineDash([3, 3]);
    pen.beginPath(); pen.moveTo(this.x(view.hover), 4); pen.lineTo(this.x(view.hover), this.plot.clientHeight - 24); pen.stroke();
    pen.setLineDash([]);
    for (const one of this.drawn) {
      const i = this.point(one);
      if (i === null) continue;
      pen.fillStyle = colourOf(one.number);
      pen.beginPath(); pen.arc(this.x(one.xs[i]), this.y(one.smooth[i]), 3.5, 0, 7); pen.fill();
    }
  }

  save() {
    const canvas = make("canvas", { width: this.base.width, height: this.base.height });
    const pen = canvas.getContext("2d");
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--card");
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(this.base, 0, 0);
    canvas.toBlob((blob) => download(blob, `${this.metric.replaceAll("/", "_")}.png`));
  }
}

/** The index of the number of a sorted list that is nearest to x. */
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

const dot = (run) => make("span", { className: "dot", style: { background: colourOf(run) } });

function download(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

let pending = false;
function drawHovers() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; charts.forEach((chart) => chart.drawHover()); });
}

const drawAll = () => charts.forEach((chart) => chart.draw());

// A chart is drawn when it comes into sight.
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = charts.find((one) => one.figure === entry.target);
    chart.visible = entry.isIntersecting;
    chart.draw();
  }
}, { rootMargin: "200px" });
