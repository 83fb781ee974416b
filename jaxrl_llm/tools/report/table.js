const HEIGHT = 30; // of a row in pixels
const TEXT = new Set(["prompt", "completion"]);
const table = { runs: [], texts: [], columns: new Map(), rows: 0, run: [], order: new Uint32Array(0), sort: null, down: false, selected: -1, names: [] };

/** Adds a piece of completions: its texts come after those that are there. */
function addPiece(piece) {
  const offset = table.texts.length;
  for (const text of piece.texts) table.texts.push(text);
  for (const [name, kind] of Object.entries(piece.kinds)) {
    if (!table.columns.has(name)) table.columns.set(name, { kind, values: new Array(table.rows).fill(null) });
    const column = table.columns.get(name);
    if (kind === "text" && column.kind === "number") { column.kind = "text"; column.values = column.values.map(asText); }
  }
  for (const [name, column] of table.columns) {
    const cells = piece.columns[name] || new Array(piece.rows).fill(null);
    const text = piece.kinds[name] === "text";
    for (const cell of cells) column.values.push(cell === null ? null : text ? cell + offset : column.kind === "text" ? asText(cell) : cell);
  }
  for (const run of piece.run) table.run.push(run);
  table.rows += piece.rows;
}

function asText(value) {
  if (value === null) return null;
  table.texts.push(String(value));
  return table.texts.length - 1;
}

const textOf = (column, row) => (column.values[row] === null ? "" : table.texts[column.values[row]]);

function makeHead() {
  const first = table.runs.length > 1 ? ["run"] : [], names = [...first, ...[...table.columns.keys()].filter((name) => name !== "images")];
  // On a phone the completion is what is in sight; the other columns are beside it.
  const narrow = innerWidth < 640;
  table.names = narrow ? ["completion", ...names.filter((name) => name !== "completion")] : names;
  const widths = table.names.map((name) => {
    if (name === "run") return "150px";
    if (name === "prompt") return "minmax(200px, 2fr)";
    if (name === "completion") return narrow ? "62vw" : "minmax(280px, 4fr)";
    return table.columns.get(name).kind === "text" ? "160px" : `${Math.max(78, Math.min(220, name.length * 8 + 58))}px`;
  });
  byId("table").style.setProperty("--columns", widths.join(" "));
  const cells = table.names.map((name) => {
    const text = isText(name);
    const button = make("button", { type: "button", textContent: name, title: `Sort by ${name}`, "data-sort": name });
    button.onclick = () => sortBy(name);
    const input = make("input", { "data-filter": name, placeholder: text ? "contains" : ">0.5", spellcheck: false });
    input.setAttribute("aria-label", `Filter ${name}`);
    input.title = text ? "A part of the text, or /regex/" : "0.5, >0.5, <=1, !=0 or 0..1";
    input.oninput = soon(filter);
    return make("div", { className: `cell ${text ? "" : "number"}`, role: "columnheader" }, button, input);
  });
  byId("head").replaceChildren(make("div", { className: "row", role: "row" }, ...cells));
}

const isText = (name) => name === "run" || table.columns.get(name).kind === "text";

function soon(action) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(action, 120); };
}

/** The text as a regex that matches it alone. */
const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

/** A test of texts: a part of them whatever the case, or /regex/; null for a regex that is none. */
function textTest(query) {
  const regex = query.match(/^\/(.+)\/$/);
  try {
    return new RegExp(regex ? regex[1] : escaped(query), "i");
  } catch {
    return null;
  }
}

/** A test of numbers: `0.5`, `>0.5`, `!=0`, `0..1`; null for anything else. */
function numberTest(query) {
  const number = "(-?(?:\\d+\\.?\\d*|\\.\\d+)(?:e-?\\d+)?)";
  const range = query.match(new RegExp(`^${number}\\s*\\.\\.\\s*${number}$`, "i"));
  if (range) return (x) => x !== null && x >= +range[1] && x <= +range[2];
  const single = query.match(new RegExp(`^(>=|<=|!=|>|<|=)?\\s*${number}$`, "i"));
  if (!single) return null;
  const bound = +single[2];
  const near = (x) => Math.abs(x - bound) <= 1e-6 * Math.max(1, Math.abs(bound));
  const tests = { ">": (x) => x > bound, "<": (x) => x < bound, ">=": (x) => x >= bound, "<=": (x) => x <= bound, "!=": (x) => !near(x) };
  const test = tests[single[1]] || near;
  return (x) => x !== null && test(x);
}

/** Which of the texts pass, each looked at once. */
function passing(test) {
  const found = new Uint8Array(table.texts.length);
  table.texts.forEach((text, i) => { found[i] = test.test(text) ? 1 : 0; });
  return found;
}

/** The tests of a row that the inputs ask for; an input that cannot be read is marked and asks for nothing. */
function rowTests() {
  const tests = [];
  const search = byId("search"), query = search.value.trim();
  const wanted = query ? textTest(query) : null;
  search.classList.toggle("bad", Boolean(query) && !wanted);
  if (wanted) {
    const found = passing(wanted);
    const columns = [...table.columns].filter(([name]) => TEXT.has(name)).map(([, column]) => column.values);
    tests.push((row) => columns.some((values) => values[row] !== null && found[values[row]]));
  }
  for (const input of document.querySelectorAll("#head input")) {
    const name = input.dataset.filter, text = input.value.trim();
    const test = !text ? null : isText(name) ? textTest(text) : numberTest(text);
    input.classList.toggle("bad", Boolean(text) && !test);
    if (!test) continue;
    if (name === "run") tests.push((row) => test.test(table.runs[table.run[row]].name));
    else {
      const { kind, values } = table.columns.get(name);
      const found = kind === "text" ? passing(test) : null;
      tests.push(found ? (row) => values[row] !== null && found[values[row]] : (row) => test(values[row]));
    }
  }
  return tests;
}

function filter() {
  const tests = rowTests();
  const kept = new Uint32Array(table.rows);
  let count = 0;
  for (let row = 0; row < table.rows; row++) if (tests.every((test) => test(row))) kept[count++] = row;
  table.order = kept.subarray(0, count);
  if (table.sort) sortRows();
  byId("rows").style.height = `${count * HEIGHT}px`;
  countText(count);
  drawRows();
}

function countText(count) {
  const means = table.names.filter((name) => !isText(name) && name !== "step" && name !== "advantage").slice(0, 4).map((name) => {
    const { values } = table.columns.get(name);
    let total = 0, known = 0;
    for (const row of table.order) if (values[row] !== null) { total += values[row]; known++; }
    return known ? `${name} ${show(total / known)}` : null;
  }).filter(Boolean);
  const of = count === table.rows ? "" : ` of ${table.rows.toLocaleString("en")}`;
  byId("count").textContent = `${count.toLocaleString("en")}${of} completions${means.length ? ` · mean ${means.join(", ")}` : ""}`;
}

function sortBy(name) {
  if (table.sort === name && table.down) { table.sort = null; table.down = false; }
  else if (table.sort === name) table.down = true;
  else { table.sort = name; table.down = false; }
  for (const button of document.querySelectorAll("#head button")) {
    const own = button.dataset.sort === table.sort;
    button.textContent = button.dataset.sort + (own ? (table.down ? " ↓" : " ↑") : "");
    button.parentNode.setAttribute("aria-sort", own ? (table.down ? "descending" : "ascending") : "none");
  }
  filter();
  byId("table").scrollTop = 0;
}

/** Sorts the rows that are shown; empty cells come last, and equal ones stay in their order. */
function sortRows() {
  const name = table.sort, sign = table.down ? -1 : 1;
  const column = table.columns.get(name);
  const key = name === "run" ? (row) => table.run[row] : column.kind === "text" ? (row) => textOf(column, row) : (row) => column.values[row];
  table.order.sort((a, b) => {
    const x = key(a), y = key(b);
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    return x < y ? -sign : x > y ? sign : a - b;
  });
}

/** Only the rows in sight are in the page. */
function drawRows() {
  const box = byId("table"), rows = byId("rows");
  const first = Math.max(0, Math.floor(box.scrollTop / HEIGHT) - 8);
  const last = Math.min(table.order.length, first + Math.ceil(box.clientHeight / HEIGHT) + 16);
  const nodes = [];
  for (let place = first; place < last; place++) nodes.push(makeRow(place));
  rows.replaceChildren(...nodes);
}

function makeRow(place) {
  const row = table.order[place];
  const cells = table.names.map((name) => {
    if (name === "run") return make("div", { className: "cell", role: "cell" }, dot(table.run[row]), ` ${table.runs[table.run[row]].name}`);
    const column = table.columns.get(name);
    if (column.kind === "number") return make("div", { className: "cell number", role: "cell", textContent: show(column.values[row]) });
    return make("div", { className: "cell text", role: "cell", textContent: textOf(column, row).slice(0, 240).replaceAll("\n", " ⏎ ") });
  });
  const node = make("div", { className: "row", role: "row", "aria-selected": String(row === table.selected), style: { top: `${place * HEIGHT}px` } }, ...cells);
  node.onclick = () => select(place);
  return node;
}

function select(place) {
  table.selected = table.order[place];
  table.place = place;
  drawRows();
  detail();
}

/** The selected completion in full. */
function detail() {
  const row = table.selected, box = byId("detail"), step = table.columns.get("step").values[row];
  const facts = table.names.filter((name) => !TEXT.has(name) && name !== "step" && name !== "run").map((name) => {
    const column = table.columns.get(name);
    return make("span", {}, `${name} `, make("b", { textContent: column.kind === "text" ? textOf(column, row) : show(column.values[row]) }));
  });
  const prompt = textOf(table.columns.get("prompt"), row);
  const same = make("button", { type: "button", textContent: "All of this prompt" });
  // An input has one line.
  same.onclick = () => { setFilter("prompt", `/^${escaped(prompt.slice(0, 300)).replaceAll("\r", "\\r").replaceAll("\n", "\\n")}${prompt.length > 300 ? "" : "$"}/`); };
  const close = make("button", { type: "button", textContent: "Close" });
  close.onclick = () => { box.hidden = true; table.selected = -1; drawRows(); };
  const pictures = table.columns.has("images") ? textOf(table.columns.get("images"), row) : "";
  // Records hold thumbnails alone; anything else of that name is text.
  const images = pictures.startsWith('["data:image/png;base64,') ? JSON.parse(pictures).map((src) => make("img", { src, alt: "an image of the prompt" })) : [];
  box.replaceChildren(
    make("div", { className: "bar" }, make("b", { textContent: `${table.runs[table.run[row]].name}, step ${step}` }), make("div", { className: "keys" }, ...facts), same, close),
    make("span", { className: "quiet", textContent: "prompt" }), ...images, make("pre", { textContent: prompt }),
    make("span", { className: "quiet", textContent: "completion" }), make("pre", { textContent: textOf(table.columns.get("completion"), row) }),
  );
  box.hidden = false;
}

function setFilter(name, value) {
  const input = [...document.querySelectorAll("#head input")].find((one) => one.dataset.filter === name);
  if (!input) return;
  input.value = value;
  filter();
  byId("table").scrollTop = 0;
}

/** The completions of a step: those of its evaluation where the curve is one. */
function showStep(step, heldOut) {
  if (!table.rows) return;
  setFilter("evaluation", heldOut ? "/./" : "");
  setFilter("step", String(step));
  byId("completions").scrollIntoView({ behavior: "smooth" });
}

function clearFilters() {
  byId("search").value = "";
  for (const input of document.querySelectorAll("#head input")) input.value = "";
  filter();
}

/** The rows that are shown, as CSV. */
function saveCsv() {
  const quote = (text) => `"${text.replaceAll('"', '""')}"`;
  const lines = [table.names.map(quote).join(",")];
  for (const row of table.order) {
    lines.push(table.names.map((name) => {
      if (name === "run") return quote(table.runs[table.run[row]].name);
      const column = table.columns.get(name);
      return column.kind === "text" ? quote(textOf(column, row)) : column.values[row] ?? "";
    }).join(","));
  }
  download(new Blob([lines.join("\n")], { type: "text/csv" }), "completions.csv");
}

function keys(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step || table.selected < 0 || event.target.tagName === "INPUT") return;
  event.preventDefault();
  const place = Math.min(table.order.length - 1, Math.max(0, table.place + step));
  const box = byId("table"), top = place * HEIGHT, head = byId("head").offsetHeight;
  if (top < box.scrollTop) box.scrollTop = top;
  if (top + HEIGHT + head > box.scrollTop + box.clientHeight) box.scrollTop = top + HEIGHT + head - box.clientHeight;
  select(place);
}
