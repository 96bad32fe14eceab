"use strict";
(() => {
  const read = (name) => JSON.parse(document.getElementById(`data-${name}`).textContent);
  const make = (name, text, attributes = {}) => {
    const element = document.createElement(name);
    element.textContent = text;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };

  // figures: drawn in the light colours, which are exchanged by value where the screen is dark
  const theme = read("theme");
  const figures = read("figures");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");
  const exchange = new Map(Object.keys(theme.light).map((name) => [theme.light[name], theme.dark[name]]));
  const recoloured = (part) => {
    if (Array.isArray(part)) return part.map(recoloured);
    if (part && typeof part === "object") {
      return Object.fromEntries(Object.entries(part).map(([key, value]) => [key, recoloured(value)]));
    }
    return typeof part === "string" && exchange.has(part) ? exchange.get(part) : part;
  };
  const places = [...document.querySelectorAll("[data-figure]")];
  const print = matchMedia("print");
  const draw = (paper) => {
    if (typeof Plotly === "undefined") return;
    for (const place of places) {
      const plain = figures[place.dataset.figure];
      const printed = paper || print.matches;
      const figure = dark.matches && !printed ? recoloured(plain) : structuredClone(plain);
      figure.layout.autosize = !printed;
      if (printed) figure.layout.width = 680; // fits A4 and letter
      if (coarse.matches) figure.layout.dragmode = false; // a finger scrolls the page
      Plotly.react(place, figure.data, figure.layout, {
        ...figure.config,
        responsive: true,
        displayModeBar: !coarse.matches,
        toImageButtonOptions: { format: "svg", filename: `batchtune-${place.dataset.figure}` },
      });
    }
  };
  draw(false);
  dark.addEventListener("change", () => draw(false));
  print.addEventListener("change", () => draw(false));
  addEventListener("beforeprint", () => draw(true));
  addEventListener("afterprint", () => draw(false));

  // what scrolls can be reached by key, and nothing else that only shows text
  const reach = () => {
    for (const each of document.querySelectorAll(".scroll, .panel pre")) {
      const scrolls = each.scrollWidth > each.clientWidth || each.scrollHeight > each.clientHeight;
      if (scrolls) each.tabIndex = 0;
      else each.removeAttribute("tabindex");
    }
  };
  addEventListener("resize", reach);
  document.addEventListener("toggle", reach, true); // of a fold

  // snippets: one panel at a time, chosen with pointer or arrow keys
  const copy = async (button, text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const field = make("textarea", text);
      document.body.append(field);
      field.select();
      document.execCommand("copy");
      field.remove();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  };
  for (const group of document.querySelectorAll(".tabs")) {
    const panels = [...group.querySelectorAll(".panel")];
    const list = make("div", "", { class: "tablist", role: "tablist", "aria-label": "Formats to paste" });
    const tabs = panels.map((panel) => {
      const tab = make("button", panel.querySelector("h3").textContent, {
        type: "button", role: "tab", id: `tab-${panel.id}`, "aria-controls": panel.id,
      });
      panel.setAttribute("role", "tabpanel");
      panel.setAttribute("aria-labelledby", tab.id);
      const button = make("button", "Copy", { type: "button", class: "copy" });
      button.addEventListener("click", () => copy(button, panel.querySelector("code").textContent));
      panel.append(button);
      return tab;
    });
    const choose = (chosen) => tabs.forEach((tab, index) => {
      tab.setAttribute("aria-selected", String(index === chosen));
      tab.tabIndex = index === chosen ? 0 : -1;
      panels[index].hidden = index !== chosen;
      reach();
    });
    tabs.forEach((tab, index) => {
      tab.addEventListener("click", () => choose(index));
      tab.addEventListener("keydown", (event) => {
        const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!move) return;
        const next = (index + move + tabs.length) % tabs.length;
        choose(next);
        tabs[next].focus();
        event.preventDefault();
      });
    });
    list.append(...tabs);
    group.prepend(list);
    group.classList.add("tabbed");
    choose(0);
  }

  // tables: a click sorts, a second one turns round; what was not measured stays at the end
  const order = new Intl.Collator(undefined, { numeric: true });
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.sort ?? cell.textContent;
    if (text === "" || text === "-") return null;
    return cell.dataset.sort === undefined ? text : Number(text);
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : order.compare(a, b));
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    heads.forEach((head, column) => {
      if (!head.textContent.trim()) return;
      const button = make("button", head.textContent, { type: "button" });
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const turned = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", turned === 1 ? "ascending" : "descending");
        const keyed = [...body.rows].map((row) => [keyOf(row, column), row]);
        keyed.sort(([a], [b]) => {
          if (a === null || b === null) return (a === null) - (b === null);
          return turned * compare(a, b);
        });
        body.append(...keyed.map(([, row]) => row));
      });
    });
  }
  reach();
})();
