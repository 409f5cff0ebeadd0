// Tables can be read without this; with it, a click on a heading sorts by it.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  const key = (row, place) => {
    const cell = row.cells[place];
    if (cell.tagName === "TH") return cell.textContent;
    return "value" in cell.dataset ? Number(cell.dataset.value) : null;
  };
  const compare = (a, b, sign) => {
    if (a === null || b === null) return (a === null) - (b === null); // what has no value comes last, either way
    return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
  };
  headings.forEach((heading, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const before = heading.getAttribute("aria-sort");
      const bestFirst = heading.dataset.better === "high" ? "descending" : "ascending";
      const now = before === null ? bestFirst : before === "ascending" ? "descending" : "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", now);
      const sign = now === "ascending" ? 1 : -1;
      const rows = [...body.rows].map((row) => [key(row, place), row]);
      body.append(...rows.sort((a, b) => compare(a[0], b[0], sign)).map(([, row]) => row));
    });
  });
}
