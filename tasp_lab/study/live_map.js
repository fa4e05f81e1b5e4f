// The live map of a study: liveMap(element, grid) draws which schedule to take where, with a choice for each axis of
// the grid (tasp_lab/study/live_map.py describes it). It loads nothing, and keeps its state in the address: #map&seq=...

"use strict";

function liveMap(root, grid) {
  const NONE = 65535;
  const WIDE = 33, HIGH = 17; // cells of an interpolated axis, at least
  const axes = grid.axes, count = grid.schedules.length;
  const time = unpacked(grid.time), regret = unpacked(grid.regret);
  const order = bytes(grid.order), bottleneck = bytes(grid.bottleneck);
  const strides = axes.map((_, place) => axes.slice(place + 1).reduce((size, axis) => size * axis.values.length, count));
  const state = { x: 0, y: 0, color: "taken", at: axes.map(() => 0) }; // positions on axes, in steps of the grid

  // ------------------------------------------------------------------------------------------------- the grid

  function bytes(text) {
    return Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  }

  function unpacked(array) {
    const codes = new Uint16Array(bytes(array.data).buffer);
    return Float64Array.from(codes, (code) => (code === NONE ? NaN : array.low + array.step * code));
  }

  // The value at a position of an axis: between two values of the grid at the same ratio.
  function valueAt(axis, at) {
    const low = Math.floor(at), share = at - low;
    if (!share) return axis.values[low];
    return axis.values[low] * (axis.values[low + 1] / axis.values[low]) ** share;
  }

  function positionOf(axis, value) {
    if (!axis.between) return axis.values.findIndex((each) => String(each) === String(value));
    const last = axis.values.length - 1, wanted = Number(value);
    if (!(wanted >= axis.values[0] && wanted <= axis.values[last])) return -1;
    let low = 0;
    while (low < last - 1 && axis.values[low + 1] <= wanted) low += 1;
    return low + Math.log(wanted / axis.values[low]) / Math.log(axis.values[low + 1] / axis.values[low]);
  }

  // The points around a position, with their weights.
  function corners(at) {
    let found = [[0, 1]];
    for (const [place, position] of at.entries()) {
      const low = Math.floor(position), share = position - low, stride = strides[place];
      found = found.flatMap(([start, weight]) => {
        const here = [[start + low * stride, weight * (1 - share)]];
        return share ? [...here, [start + (low + 1) * stride, weight * share]] : here;
      });
    }
    return found;
  }

  // What is predicted at a position: all schedules with a time, the fastest first, and what to take. The rule is that of
  // tasp_lab.prediction.recommend: of the schedules within grid.tie of the least expected regret the first in order.
  function answer(at) {
    const around = corners(at);
    const nearest = around.reduce((best, each) => (each[1] > best[1] ? each : best))[0];
    const rows = [];
    for (let schedule = 0; schedule < count; schedule += 1) {
      let logTime = 0, logRegret = 0;
      for (const [start, weight] of around) {
        logTime += weight * time[start + schedule];
        logRegret += weight * regret[start + schedule];
      }
      if (Number.isNaN(logTime)) continue;
      rows.push({ schedule, time: Math.exp(logTime), regret: Math.expm1(logRegret), order: order[nearest + schedule],
        bottleneck: grid.bottlenecks[bottleneck[nearest + schedule]] || "" });
    }
    rows.sort((one, other) => one.time - other.time || one.schedule - other.schedule);
    if (!rows.length) return null;
    const known = rows.filter((row) => !Number.isNaN(row.regret));
    const least = Math.min(...known.map((row) => row.regret));
    const tied = known.filter((row) => row.regret <= least + grid.tie).sort((one, other) => one.order - other.order);
    const taken = tied[0] || rows[0];
    const sure = !tied.length || taken.regret > grid.decided ? "unsure" : tied.length > 1 ? "tie" : "decided";
    return { rows, taken, tied, sure };
  }

  // -------------------------------------------------------------------------------------------------- as text

  function rounded(value, digits) {
    return String(Number(value.toPrecision(digits)));
  }

  function timeText(seconds) {
    const [unit, size] = [["s", 1], ["ms", 1e-3], ["us", 1e-6]].find(([, each]) => seconds >= each) || ["ns", 1e-9];
    return `${rounded(seconds / size, 4)} ${unit}`;
  }

  function percent(share) {
    return `${(100 * share).toFixed(1)}%`;
  }

  // A length between two of the grid is a multiple of 1Ki, as ranks and chunks must divide it; a factor has two digits.
  function chosen(axis, at) {
    const value = valueAt(axis, at);
    if (!axis.between || at === Math.floor(at)) return value;
    return axis.name === "seq" ? Math.max(1, Math.round(value / 1024)) * 1024 : Number(value.toPrecision(2));
  }

  function textAt(axis, at) {
    if (at === Math.floor(at)) return axis.texts[at];
    const value = chosen(axis, at);
    return axis.name === "seq" ? `${value / 1024}Ki` : `x${value}`;
  }

  function command(at) {
    const [name, ...held] = grid.command, parts = [], place = axes.findIndex((axis) => axis.name === "machine");
    for (const [number, axis] of axes.entries()) {
      if (!axis.arguments.length || number === place) continue;
      const value = chosen(axis, at[number]), isFactor = axis.arguments[0].endsWith("=x");
      if (axis.name === "variant") parts.push(axis.arguments[at[number]]);
      else if (isFactor && value !== 1) parts.push(axis.arguments[0] + value);
      else if (!isFactor) parts.push(axis.arguments[0] + textAt(axis, at[number]));
    }
    const machine = place < 0 ? [] : [axes[place].values[at[place]]];
    return [name, ...machine, ...held, ...parts].filter(Boolean).join(" ");
  }

  // -------------------------------------------------------------------------------------------- the elements

  function element(name, attributes = {}, ...children) {
    const svg = ["svg", "rect", "path", "text", "g", "title", "circle"].includes(name);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function select(label, options, picked, change) {
    const box = element("select", {}, ...options.map(([value, text]) => {
      const option = element("option", { value }, text);
      option.selected = String(value) === String(picked);
      return option;
    }));
    box.addEventListener("change", () => change(box.value));
    return element("label", {}, `${label} `, box);
  }

  root.classList.add("live-map");
  const style = element("style");
  style.textContent = `
    .live-map { font: 14px/1.4 system-ui, sans-serif; color: #222; background: #fff; }
    .live-map .controls { display: flex; flex-wrap: wrap; gap: .2rem .9rem; align-items: center; }
    .live-map label { display: inline-flex; align-items: center; gap: .35rem; }
    .live-map select { font: inherit; max-width: 12rem; }
    .live-map input[type=range] { width: 8.5rem; }
    .live-map output { font-variant-numeric: tabular-nums; min-width: 3rem; }
    .live-map .both { display: flex; flex-wrap: wrap; gap: .4rem 1.4rem; align-items: flex-start; }
    .live-map .picture { flex: 3 1 26rem; min-width: 0; max-width: 100%; }
    .live-map .answer { flex: 2 1 19rem; min-width: 0; max-width: 100%; }
    .live-map svg { display: block; width: 100%; height: auto; outline-offset: 2px; cursor: crosshair; }
    .live-map svg text { font: 12px system-ui, sans-serif; fill: #444; }
    .live-map svg:focus-visible { outline: 3px solid #4477aa; }
    .live-map .legend { display: flex; flex-wrap: wrap; gap: 0 .9rem; margin: .2rem 0; font-size: 13px; }
    .live-map .legend i { display: inline-block; width: .85rem; height: .85rem; border-radius: 2px; margin-right: .3rem;
      vertical-align: -.1rem; }
    .live-map .use { font-size: 16px; margin: .1rem 0; }
    .live-map .sure { margin: .1rem 0 .4rem; }
    .live-map table { border-collapse: collapse; display: table; width: 100%; font-size: 13px; margin: 0; border: 0; }
    .live-map th, .live-map td { text-align: right; padding: .08rem .35rem; border: 0; min-width: 0; background: none;
      font-variant-numeric: tabular-nums; }
    .live-map th { font-weight: 600; border-bottom: 1px solid #ccc; }
    .live-map th:first-child, .live-map td:first-child { text-align: left; overflow-wrap: anywhere; }
    .live-map td:nth-child(2) { white-space: nowrap; }
    @media (max-width: 640px) { .live-map th:nth-child(5), .live-map td:nth-child(5) { display: none; } }
    .live-map tr.taken td { font-weight: 600; }
    .live-map .command { display: flex; gap: .5rem; align-items: flex-start; margin: .5rem 0 0; }
    .live-map .command code { flex: 1; background: #f0f2f5; padding: .3rem .5rem; border-radius: 4px; font-size: 12px;
      overflow-wrap: anywhere; white-space: normal; }
    .live-map button { font: inherit; cursor: pointer; padding: .15rem .6rem; border: 1px solid #999; border-radius: 4px;
      background: #fff; color: #222; }
    .live-map .note { color: #666; font-size: 12px; margin: .3rem 0 0; }`;
  const controls = element("div", { class: "controls" }), legend = element("p", { class: "legend" });
  const svg = element("svg", { tabindex: "0", role: "application" });
  const use = element("p", { class: "use" }), sure = element("p", { class: "sure" });
  const spoken = element("div", { "aria-live": "polite" }, use, sure);
  const table = element("table"), code = element("code"), copy = element("button", { type: "button" }, "Copy");
  const note = element("p", { class: "note" });
  root.replaceChildren(style, controls, element("div", { class: "both" },
    element("div", { class: "picture" }, legend, svg),
    element("div", { class: "answer" }, spoken, table, element("div", { class: "command" }, code, copy))), note);
  if (grid.error) {
    note.textContent = `Between points of the grid times are interpolated: ${grid.error.times.toLocaleString("en")} `
      + `times ${grid.error.where} are missed by ${percent(grid.error.median)} in the median, nine of ten by at most `
      + `${percent(grid.error.ninth)}.`;
  } else note.textContent = "Each cell is a prediction; nothing is interpolated.";

  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      document.execCommand("copy");
    }
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });

  // ------------------------------------------------------------------------------------------------- controls

  function showControls() {
    const named = axes.map((axis, place) => [place, axis.title]);
    const across = (name) => (value) => {
      const other = name === "x" ? "y" : "x", before = state[name];
      state[name] = Number(value);
      if (axes.length > 1 && state[other] === state[name]) state[other] = before;
      showControls();
      draw();
    };
    controls.replaceChildren(select("across", named, state.x, across("x")));
    if (axes.length > 1) controls.append(select("down", named, state.y, across("y")));
    const colors = [["taken", "the one to take"], ["fastest", "the fastest"]];
    controls.append(select("color", colors, state.color, (value) => { state.color = value; draw(); }));
    for (const [place, axis] of axes.entries()) {
      if (!axis.between && typeof axis.values[0] !== "number") {
        const options = axis.texts.map((text, value) => [value, text]);
        controls.append(select(axis.title, options, state.at[place], (value) => move(place, Number(value))));
        continue;
      }
      const range = element("input", { type: "range", min: 0, max: axis.values.length - 1,
        step: axis.between ? 0.125 : 1, "data-axis": axis.name });
      const text = element("output");
      range.value = state.at[place];
      const tell = () => {
        text.textContent = textAt(axis, state.at[place]);
        range.setAttribute("aria-valuetext", text.textContent);
      };
      range.addEventListener("input", () => { move(place, Number(range.value)); tell(); });
      tell();
      controls.append(element("label", {}, axis.title, range, text));
    }
  }

  function move(place, position) {
    state.at[place] = position;
    draw();
  }

  // ---------------------------------------------------------------------------------------------- the picture

  let cells; // positions of columns and rows, and the size of the picture

  function positions(axis, least) {
    const last = axis.values.length - 1, parts = axis.between ? Math.max(1, Math.ceil((least - 1) / last)) : 1;
    return Array.from({ length: last * parts + 1 }, (_, step) => step / parts);
  }

  function draw() {
    const narrow = root.clientWidth < 560, single = axes.length === 1;
    const [across, down] = [axes[state.x], axes[state.y]];
    const xs = positions(across, WIDE), ys = single ? [0] : positions(down, HIGH);
    if (!single && down.between) ys.reverse(); // larger numbers higher up
    const labels = single ? [""] : ys.map((y) => (y === Math.floor(y) ? down.texts[y] : ""));
    const left = 14 + 7 * Math.max(...labels.map((text) => Math.min(text.length, 16)));
    const width = narrow ? 380 : 620, size = single ? 60 : Math.min(30, Math.max(11, (narrow ? 230 : 300) / ys.length));
    const cellWide = (width - left - 4) / xs.length, top = 4, height = top + ys.length * size + 34;
    cells = { xs, ys, left, top, cellWide, size };
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const shapes = [], used = new Map();
    const at = [...state.at];
    for (const [row, y] of ys.entries()) {
      for (const [column, x] of xs.entries()) {
        if (!single) at[state.y] = y;
        at[state.x] = x;
        const found = answer(at);
        if (!found) continue;
        const shown = state.color === "taken" ? found.taken : found.rows[0];
        used.set(shown.schedule, (used.get(shown.schedule) || 0) + 1);
        const [px, py] = [left + column * cellWide, top + row * size];
        shapes.push(element("rect", { x: px.toFixed(2), y: py.toFixed(2), width: (cellWide + 0.4).toFixed(2),
          height: (size + 0.4).toFixed(2), fill: grid.colors[shown.schedule], "data-sure": found.sure,
          "data-schedule": grid.schedules[shown.schedule], opacity: found.sure === "unsure" ? 0.4 : 0.85 }));
        const [mx, my] = [px + cellWide / 2, py + size / 2];
        if (found.sure === "tie") shapes.push(element("circle", { cx: mx, cy: my, r: 1.6, fill: "#fff" }));
        if (found.sure === "unsure") {
          shapes.push(element("path", { d: `M${mx - 3} ${my + 3}L${mx + 3} ${my - 3}`, stroke: "#333", opacity: 0.6 }));
        }
      }
    }
    for (const [row, text] of labels.entries()) {
      if (!text) continue;
      const label = text.length > 16 ? `${text.slice(0, 15)}\u2026` : text;
      shapes.push(element("text", { x: left - 5, y: top + (row + 0.5) * size + 4, "text-anchor": "end" }, label));
    }
    const every = Math.ceil(across.values.length * 44 / (width - left));
    for (const [column, x] of xs.entries()) {
      if (x !== Math.floor(x) || x % every) continue;
      shapes.push(element("text", { x: left + (column + 0.5) * cellWide, y: height - 19, "text-anchor": "middle" },
        across.texts[x].slice(0, 16)));
    }
    const middle = left + (width - left) / 2;
    shapes.push(element("text", { x: middle, y: height - 4, "text-anchor": "middle" }, across.title));
    const [column, row] = here();
    shapes.push(element("rect", { x: left + column * cellWide - 1, y: top + row * size - 1, width: cellWide + 2,
      height: size + 2, fill: "none", stroke: "#000", "stroke-width": 2.5, class: "here" }));
    svg.replaceChildren(...shapes);
    const names = [...used].sort((one, other) => other[1] - one[1]).map(([schedule]) => {
      const color = element("i", { style: `background: ${grid.colors[schedule]}` });
      return element("span", {}, color, grid.schedules[schedule]);
    });
    legend.replaceChildren(...names, element("span", {}, "\u00b7 tie"), element("span", {}, "pale, / unsure"));
    tell();
  }

  // The column and the row of the chosen point.
  function here() {
    const nearest = (places, at) => places.reduce((best, place, number) =>
      (Math.abs(place - at) < Math.abs(places[best] - at) ? number : best), 0);
    return [nearest(cells.xs, state.at[state.x]), axes.length > 1 ? nearest(cells.ys, state.at[state.y]) : 0];
  }

  function tell() {
    const found = answer(state.at);
    code.textContent = command(state.at);
    const where = axes.map((axis, place) => `${axis.title} ${textAt(axis, state.at[place])}`).join(", ");
    svg.setAttribute("aria-label", `Map of schedules over ${axes[state.x].title} and ${axes[state.y].title}. Arrow keys `
      + `move the point: ${where}.`);
    if (!found) {
      use.textContent = "No schedule has a time here.";
      sure.textContent = "";
      table.replaceChildren();
    } else {
      const name = grid.schedules[found.taken.schedule];
      use.replaceChildren("Use ", element("b", {}, name), `: ${timeText(found.taken.time)}, bottleneck `
        + `${found.taken.bottleneck || "unknown"}.`);
      const names = found.tied.map((row) => grid.schedules[row.schedule]).join(", ");
      const cost = Number.isNaN(found.taken.regret) ? "" : ` Expected regret ${percent(found.taken.regret)}.`;
      sure.textContent = { decided: `Decided.${cost}`, tie: `A tie of ${names}.${cost}`,
        unsure: `Unsure${found.tied.length > 1 ? `: ${names} may all be the fastest` : ""}.${cost}` }[found.sure];
      const head = ["schedule", "time", "over fastest", "regret", "bottleneck"];
      table.replaceChildren(element("tr", {}, ...head.map((title) => element("th", { scope: "col" }, title))),
        ...found.rows.map((row) => element("tr", row === found.taken ? { class: "taken" } : {},
          ...[grid.schedules[row.schedule], timeText(row.time), `${(row.time / found.rows[0].time).toFixed(2)}x`,
            Number.isNaN(row.regret) ? "-" : percent(row.regret), row.bottleneck].map((text) => element("td", {}, text)))));
    }
    remember();
  }

  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [column, row] = here();
    go(column + step[0], row + step[1]);
  });

  function go(column, row) {
    const within = (places, number) => places[Math.min(places.length - 1, Math.max(0, number))];
    if (axes.length > 1) state.at[state.y] = within(cells.ys, row);
    state.at[state.x] = within(cells.xs, column);
    showControls();
    draw();
  }

  svg.addEventListener("click", (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    svg.focus();
    go(Math.floor((point.x - cells.left) / cells.cellWide), Math.floor((point.y - cells.top) / cells.size));
  });

  // ------------------------------------------------------------------------------------- state in the address

  function remember() {
    const parts = new URLSearchParams();
    for (const [place, axis] of axes.entries()) parts.set(axis.name, valueText(axis, state.at[place]));
    parts.set("across", axes[state.x].name);
    parts.set("down", axes[state.y].name);
    parts.set("color", state.color);
    if (root.dataset.moved) history.replaceState(null, "", `#map&${parts}`);
    root.dataset.moved = "yes"; // the first picture leaves the address as it is
  }

  function valueText(axis, at) {
    return axis.between ? Number(valueAt(axis, at).toPrecision(9)) : axis.values[at];
  }

  function recall() {
    if (!location.hash.startsWith("#map&")) return false;
    const parts = new URLSearchParams(location.hash.slice(5));
    for (const [place, axis] of axes.entries()) {
      const at = parts.has(axis.name) ? positionOf(axis, parts.get(axis.name)) : -1;
      if (at >= 0) state.at[place] = Math.abs(at - Math.round(at)) < 1e-6 ? Math.round(at) : at;
    }
    for (const [key, name] of [["x", "across"], ["y", "down"]]) {
      const place = axes.findIndex((axis) => axis.name === parts.get(name));
      if (place >= 0) state[key] = place;
    }
    if (parts.get("color") === "fastest") state.color = "fastest";
    return true;
  }

  // Across and down are the first interpolated axes, else the last and the first one.
  const first = axes.findIndex((axis) => axis.between);
  state.x = first < 0 ? axes.length - 1 : first;
  const second = axes.findIndex((axis, place) => place !== state.x && axis.between);
  state.y = second >= 0 ? second : Math.max(0, axes.findIndex((_, place) => place !== state.x));
  for (const [place, axis] of axes.entries()) {
    const asIs = axis.values.indexOf(1); // a factor of 1, else the middle of numbers, else the first
    if (typeof axis.values[0] === "number") state.at[place] = asIs >= 0 ? asIs : Math.floor(axis.values.length / 2);
  }
  recall();
  showControls();
  draw();
  addEventListener("hashchange", () => { if (recall()) { showControls(); draw(); } });
  addEventListener("resize", draw);
}
