"use strict";
// Draws the charts of the page, wires their switches and the tables, and keeps a live page up to date.
(() => {
  const rowsOf = (columns) => {
    const names = Object.keys(columns);
    return names.length ? columns[names[0]].map((_, i) => Object.fromEntries(names.map((n) => [n, columns[n][i]]))) : [];
  };

  const matches = (row, where) => Object.entries(where).every(([name, value]) => row[name] === value);

  // Gives every encoding of a channel the scale and the axis that were chosen; layers may have encodings of their own.
  const withAxis = (node, channel, chosen) => {
    if (Array.isArray(node)) return node.map((each) => withAxis(each, channel, chosen));
    if (node === null || typeof node !== "object") return node;
    const copy = Object.fromEntries(Object.entries(node).map(([key, value]) => [key, withAxis(value, channel, chosen)]));
    if (copy.encoding && copy.encoding[channel] && copy.encoding[channel].field) {
      const own = copy.encoding[channel];
      copy.encoding[channel] = { ...own, scale: { ...own.scale, ...chosen.scale }, axis: { ...own.axis, ...chosen.axis } };
    }
    return copy;
  };

  let config = {};

  const ALL = "all";

  const wire = (section, chart) => {
    const form = section.querySelector("form");
    form.addEventListener("change", () => draw(section, chart));
    form.addEventListener("submit", (event) => event.preventDefault());
    section.querySelector(".numbers").addEventListener("toggle", (event) => {
      if (event.target.open) numbers(section, chart);
    });
  };

  const chosen = (section, chart) => {
    const label = new FormData(section.querySelector("form")).get("choice") ?? (chart.side_by_side ? ALL : chart.choices[0]?.label);
    if (label === ALL || label === undefined) return chart.choices.length ? chart.choices : [{ label: "", where: {}, domains: {} }];
    return chart.choices.filter((choice) => choice.label === label);
  };

  const draw = async (section, chart) => {
    const picked = new FormData(section.querySelector("form"));
    let spec = chart.spec;
    for (const [channel, scales] of Object.entries(chart.axes)) {
      const names = Object.keys(scales);
      spec = withAxis(spec, channel, scales[picked.get(`axis-${channel}`) ?? names[0]]);
    }
    const rows = rowsOf(chart.columns);
    const shown = chosen(section, chart);
    const panels = section.querySelector(".panels");
    while (panels.children.length > shown.length) panels.lastElementChild.remove();
    for (const [i, choice] of shown.entries()) {
      if (i === panels.children.length) panels.append(panels.firstElementChild.cloneNode(true));
      const [caption, plot] = panels.children[i].children;
      caption.textContent = choice.label;
      const values = rows.filter((row) => matches(row, choice.where));
      let own = spec;
      for (const [channel, domain] of Object.entries(choice.domains)) own = withAxis(own, channel, { scale: { domain } });
      const full = { ...own, width: "container", height: "container", autosize: { type: "fit", contains: "padding" }, data: { values }, description: `${chart.title} ${choice.label}` };
      await vegaEmbed(plot, full, { renderer: "svg", actions: false, config, logLevel: 1 }); // errors only: kinds of rows that a run lacks are none
    }
    if (section.querySelector(".numbers").open) numbers(section, chart);
    section.dataset.drawn = String(Number(section.dataset.drawn ?? 0) + 1);
  };

  const numbers = (section, chart) => {
    const names = Object.keys(chart.columns);
    const wheres = chosen(section, chart).map((choice) => choice.where);
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    names.forEach((name) => head.append(Object.assign(document.createElement("th"), { scope: "col", textContent: name })));
    const body = table.createTBody();
    rowsOf(chart.columns).filter((row) => wheres.some((where) => matches(row, where))).forEach((row) => {
      const tr = body.insertRow();
      names.forEach((name) => { tr.insertCell().textContent = row[name] ?? ""; });
    });
    section.querySelector(".numbers .scroll").replaceChildren(table);
  };

  const sortable = (table) => {
    table.querySelectorAll("th button").forEach((button, column) => {
      button.addEventListener("click", () => {
        const th = button.parentElement;
        const down = th.getAttribute("aria-sort") === "ascending";
        table.querySelectorAll("th").forEach((each) => each.removeAttribute("aria-sort"));
        th.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => row.cells[column].dataset.order;
        const compare = (a, b) => {
          const [x, y] = [key(a), key(b)].map(Number.parseFloat);
          if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1; // what has no number stands last
          const difference = Number.isNaN(x) ? a.cells[column].textContent.localeCompare(b.cells[column].textContent) : x - y;
          return down ? -difference : difference;
        };
        table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
      });
    });
  };

  const wireAll = () => {
    const { pages: charts, ...look } = JSON.parse(document.getElementById("charts").textContent);
    config = look.config;
    document.querySelectorAll("table.sortable").forEach(sortable);
    document.querySelectorAll("section.chart").forEach((section) => wire(section, charts[section.dataset.page][section.dataset.chart]));
    return charts;
  };

  const redraw = async (charts) => {
    for (const section of document.querySelectorAll("section.chart")) {
      await draw(section, charts[section.dataset.page][section.dataset.chart]);
    }
    document.body.dataset.ready = String(Number(document.body.dataset.ready ?? 0) + 1); // for whoever waits for the pictures
  };

  // A live page: what the reader has chosen, opened, sorted and focused stays as it is.
  const kept = () => ({
    picked: [...document.querySelectorAll("section.chart")].map((section) => [section.id, [...new FormData(section.querySelector("form"))]]),
    open: [...document.querySelectorAll("details")].map((each) => each.open),
    sorted: [...document.querySelectorAll("table.sortable")].map((table) => {
      const cells = [...table.querySelectorAll("th")];
      const column = cells.findIndex((th) => th.hasAttribute("aria-sort"));
      return column < 0 ? null : [column, cells[column].getAttribute("aria-sort")];
    }),
    focused: document.activeElement?.closest("section")?.id && [document.activeElement.closest("section").id, document.activeElement.name, document.activeElement.value],
  });

  const restore = (state) => {
    for (const [id, values] of state.picked) {
      const form = document.getElementById(id)?.querySelector("form");
      for (const [name, value] of values) {
        const inputs = form ? [...form.elements].filter((each) => each.name === name) : [];
        inputs.forEach((each) => { if (each.type === "radio") each.checked = each.value === value; else each.value = value; });
      }
    }
    document.querySelectorAll("details").forEach((each, i) => { each.open = state.open[i] ?? false; });
    document.querySelectorAll("table.sortable").forEach((table, i) => {
      const [column, direction] = state.sorted[i] ?? [];
      if (column === undefined) return;
      const button = table.querySelectorAll("th button")[column];
      button.click();
      if (direction === "descending") button.click();
    });
  };

  const focusAgain = ({ focused }) => {
    if (!focused) return;
    const [id, name, value] = focused;
    const elements = [...(document.getElementById(id)?.querySelector("form")?.elements ?? [])];
    elements.find((each) => each.name === name && (each.type !== "radio" || each.value === value))?.focus({ preventScroll: true });
  };

  const follow = (seconds) => {
    let version = document.body.dataset.version;
    const status = document.getElementById("status");
    const look = async () => {
      try {
        const reply = await fetch(`body?version=${version}`, { cache: "no-store" });
        if (reply.status === 200) {
          version = reply.headers.get("X-Version");
          const text = await reply.text();
          const state = kept();
          document.getElementById("main").innerHTML = text;
          const charts = wireAll();
          restore(state);
          await redraw(charts);
          focusAgain(state);
        } else if (reply.status !== 304) throw new Error(await reply.text());
        status.textContent = `Live: looked at ${new Date().toLocaleTimeString()}.`;
      } catch (error) {
        status.textContent = `No answer from surefoot watch since ${new Date().toLocaleTimeString()}: ${error.message}`;
      }
      setTimeout(look, 1000 * seconds);
    };
    look();
  };

  redraw(wireAll()).then(() => { if (document.body.dataset.live) follow(Number(document.body.dataset.live)); });
})();
