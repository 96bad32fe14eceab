"use strict";
(() => {
  const make = (name, text, attributes = {}) => {
    const element = document.createElement(name);
    element.textContent = text;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };

  // a run that goes on: its page is looked for anew, but not under somebody who is at work in it
  const { refresh } = document.documentElement.dataset;
  if (refresh) setInterval(() => { if (document.activeElement === document.body) location.reload(); }, 1000 * refresh);

  // figures: what a browser tells about a point after a while, at once and under a finger, too
  const tip = make("div", "", { class: "tip", role: "tooltip", hidden: "" });
  document.body.append(tip);
  for (const title of document.querySelectorAll(".drawing title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  addEventListener("pointerover", ({ target, clientX, clientY }) => {
    tip.textContent = target.dataset?.tip ?? "";
    tip.hidden = tip.textContent === "";
    tip.style.left = `${Math.max(4, Math.min(clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(4, Math.min(clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
  });

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
