for (const head of document.querySelectorAll("table.sortable th")) {
  const sort = () => {
    const table = head.closest("table"), column = [...head.parentNode.children].indexOf(head), up = head.ariaSort === "descending";
    for (const other of table.querySelectorAll("th")) other.ariaSort = null;
    head.ariaSort = up ? "ascending" : "descending";
    const value = row => {
      const cell = row.children[column];
      return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
    };
    const rows = [...table.tBodies[0].rows].sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
    table.tBodies[0].append(...(up ? rows : rows.reverse()));
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", event => event.key === "Enter" && sort());
}
