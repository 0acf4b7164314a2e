"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("thead th").forEach((head, column) => {
    head.tabIndex = 0;
    head.setAttribute("aria-sort", "none");
    const sort = () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      table.querySelectorAll("thead th").forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => {
        const cell = row.cells[column];
        if (!cell) return "";
        const text = cell.dataset.value ?? cell.textContent.trim();
        return text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text;
      };
      const body = table.tBodies[0];
      const order = (a, b) => {
        const [x, y] = [value(a), value(b)];
        if (typeof x === "number" && typeof y === "number") return x - y;
        if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
        return String(x).localeCompare(String(y));
      };
      [...body.rows].sort((a, b) => (up ? order(a, b) : order(b, a))).forEach((row) => body.append(row));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}
for (const table of document.querySelectorAll("table")) {
  const heads = [...(table.rows[0]?.querySelectorAll("th") ?? [])].map((head) => head.textContent.trim());
  if (heads.length === 0) continue;
  table.classList.add("cards");
  table.rows[0].classList.add("heads");
  for (const row of table.rows) {
    for (const cell of row.querySelectorAll("td:not([colspan])")) cell.dataset.label = heads[cell.cellIndex] ?? "";
  }
}
const filter = document.getElementById("filter");
const failing = document.getElementById("failing");
if (filter && failing) {
  const apply = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of document.querySelectorAll("table.filtered tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = (failing.checked && row.dataset.passed !== "no") || !words.every((word) => text.includes(word));
    }
  };
  filter.addEventListener("input", apply);
  failing.addEventListener("change", apply);
}
for (const chart of document.querySelectorAll(".chart")) {
  const note = chart.querySelector(".note");
  const idle = note.textContent;
  chart.addEventListener("mouseover", (event) => {
    note.textContent = event.target.querySelector?.(":scope > title")?.textContent ?? idle;
  });
}
