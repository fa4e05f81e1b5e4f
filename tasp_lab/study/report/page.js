// Tables that sort and filter, and pictures with a choice of panels. All data is in the element "data".

const data = JSON.parse(document.getElementById("data").textContent);

// ---------------------------------------------------------------------------------------------------- tables

const PAGE = window.innerWidth < 640 ? 10 : 25;

const UNITS = {
  Ki: 2 ** 10, Mi: 2 ** 20, Gi: 2 ** 30, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40,
  s: 1, ms: 1e-3, us: 1e-6, ns: 1e-9, x: 1, "%": 1e-2, "": 1,
};

// A filter of a column: a comparison with a number, or a part of a text.
function filter(query) {
  const found = query.match(/^(<=|>=|<|>|=)\s*([0-9.eE+-]+)\s*([A-Za-z%]*)$/);
  if (found && found[3] in UNITS && Number.isFinite(Number(found[2]))) {
    const limit = Number(found[2]) * UNITS[found[3]];
    const holds = { "<": (v) => v < limit, "<=": (v) => v <= limit, ">": (v) => v > limit, ">=": (v) => v >= limit,
      "=": (v) => v === limit }[found[1]];
    return (cell) => Array.isArray(cell) && holds(cell[1]);
  }
  const part = query.toLowerCase();
  return (cell) => (Array.isArray(cell) ? cell[0] : cell).toLowerCase().includes(part);
}

function escaped(text) {
  return text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
}

function shown(cell, type) {
  const number = Array.isArray(cell);
  if (type === "sort" || type === "type") return number ? cell[1] : cell === "-" ? null : cell;
  const text = number ? cell[0] : cell;
  return type === "display" ? escaped(text) : text;
}

function heading(table, found, numeric) {
  const head = table.createTHead();
  const titles = head.insertRow();
  for (const [place, title] of found.columns.entries()) {
    const cell = document.createElement("th");
    cell.textContent = title;
    cell.className = numeric.has(place) ? "number" : "text";
    titles.append(cell);
  }
  if (table.classList.contains("small")) return;
  const filters = head.insertRow();
  filters.className = "filters";
  for (const title of found.columns) {
    const cell = document.createElement("th");
    const input = document.createElement("input");
    input.type = "search";
    input.setAttribute("aria-label", `filter ${title}`);
    cell.append(input);
    filters.append(cell);
  }
}

// Numbers to the right, short texts on one line, long ones wrapped.
function kind(found, place, numeric) {
  if (numeric.has(place)) return "number";
  return found.rows.some((row) => String(row[place]).length > 34) ? "long" : "text";
}

function fill(DataTable, name, found) {
  const table = document.getElementById(`table-${name}`);
  const numeric = new Set(found.numeric);
  const small = table.classList.contains("small"), paged = !small && found.rows.length > PAGE;
  heading(table, found, numeric);
  const made = new DataTable(table, {
    data: found.rows,
    columns: found.columns.map((_, place) => ({
      data: place, render: shown, className: kind(found, place, numeric),
    })),
    order: [], autoWidth: false, deferRender: true, paging: paged, pageLength: PAGE,
    lengthMenu: [PAGE, 100, 1000, { label: "all", value: -1 }],
    titleRow: 0, orderMulti: true, language: {
      search: "search", lengthMenu: "_MENU_ rows", info: "_START_ to _END_ of _TOTAL_ rows", infoEmpty: "0 of 0 rows",
      infoFiltered: "(_MAX_ without filters)", zeroRecords: "no row is left",
    },
    layout: {
      topStart: paged ? "pageLength" : null, topEnd: small ? null : "search",
      bottomStart: small ? null : "info", bottomEnd: paged ? "paging" : null,
    },
  });
  for (const [place, input] of [...table.querySelectorAll("thead tr.filters input")].entries()) {
    input.addEventListener("input", () => {
      const holds = input.value.trim() ? filter(input.value.trim()) : null;
      const column = made.column(place);
      (holds ? column.search((_, row) => holds(row[place])) : column.search("")).draw();
    });
  }
}

async function tables() {
  const bytes = Uint8Array.from(atob(DATATABLES), (sign) => sign.charCodeAt(0));
  const url = URL.createObjectURL(new Blob([bytes], { type: "text/javascript" }));
  const { default: DataTable } = await import(url);
  URL.revokeObjectURL(url);
  for (const [name, found] of Object.entries(data.tables)) fill(DataTable, name, found);
  document.body.dataset.tables = "ready";
}

// -------------------------------------------------------------------------------------------------- pictures

function draw(name, found) {
  const selects = [...document.querySelectorAll(`#choices-${name} select`)];
  const show = () => {
    const key = selects.map((select) => select.value);
    const place = found.keys.findIndex((each) => each.every((value, axis) => value === key[axis]));
    const layout = { ...found.layout };
    if (place < 0) layout.annotations = [{ text: "no point here", showarrow: false, xref: "paper", yref: "paper" }];
    Plotly.react(`figure-${name}`, place < 0 ? [] : found.panels[place], layout,
      { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] });
  };
  for (const select of selects) select.addEventListener("change", show);
  show();
}

for (const [name, found] of Object.entries(data.figures)) draw(name, found);
await tables();
