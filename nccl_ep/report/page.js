"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");

  function show(event, text) {
    tip.textContent = text;
    tip.style.visibility = "visible";
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = Math.min(event.clientX + 14, innerWidth - width - 8) + "px";
    tip.style.top = Math.max(event.clientY - height - 10, 8) + "px";
  }
  const hide = () => { tip.style.visibility = "hidden"; };

  function time(us) {
    const [scale, unit] = Math.abs(us) < 1e3 ? [1, "us"] : Math.abs(us) < 1e6 ? [1e3, "ms"] : [1e6, "s"];
    return Number((us / scale).toPrecision(4)) + " " + unit;
  }

  // ---- Lines: the figures under the pointer
  for (const chart of document.querySelectorAll("[data-lines]")) {
    const about = JSON.parse(chart.dataset.lines), svg = chart.querySelector("svg");
    const cursor = chart.querySelector(".cursor");
    const count = Math.max(...about.series.map(each => each.values.length));
    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const at = ((event.clientX - box.left) * scale - about.left) / about.width * count;
      const i = Math.max(0, Math.min(count - 1, Math.floor(at)));
      const x = about.left + about.width * (i + 0.5) / count;
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.style.visibility = "visible";
      const first = i * about.stretch, last = first + about.stretch - 1;
      const lines = about.series.filter(each => each.values[i] != null).map(
        each => each.name + ": " + (about.unit === "us" ? time(each.values[i]) : Number(each.values[i].toPrecision(4))));
      const at_x = about.at.length ? about.at[i] : last > first ? first + " to " + last : first;
      show(event, [about.x + " " + at_x, ...lines].join("\n"));
    });
    svg.addEventListener("pointerleave", () => { cursor.style.visibility = "hidden"; hide(); });
  }

  // ---- The time line: wheel zooms, dragging moves
  const line = document.getElementById("time-line");
  if (line === null) return;
  const spans = data.recorded.spans, NS = "http://www.w3.org/2000/svg";
  const lanes = [];
  for (const rank of data.recorded.ranks) {
    lanes.push({ rank, where: "host" });
    if (spans.some(each => each.rank === rank && "device_us" in each)) lanes.push({ rank, where: "GPU" });
  }
  const bars = spans.flatMap(span => {
    const lane = where => lanes.findIndex(each => each.rank === span.rank && each.where === where);
    const found = [{ span, lane: lane("host"), begin: span.begin_us, us: span.us }];
    if ("device_us" in span) found.push({ span, lane: lane("GPU"), begin: span.device_begin_us, us: span.device_us });
    return found;
  });
  const colour = span => span.mode === "LL" ? (span.kind === "dispatch" ? "s1" : "s2")
    : (span.kind === "dispatch" ? "s3" : "s4");
  const end = Math.max(...bars.map(bar => bar.begin + bar.us), 1), first = Math.min(...bars.map(bar => bar.begin), 0);
  const HEIGHT = 22, LEFT = 84, TOP = 22, WIDTH = 1120;
  line.setAttribute("viewBox", `0 0 ${WIDTH} ${TOP + lanes.length * HEIGHT + 6}`);
  let from = first, to = end;

  function add(tag, attributes, text) {
    const made = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    line.appendChild(made);
    return made;
  }

  function draw() {
    line.replaceChildren();
    const scale = (WIDTH - LEFT) / (to - from), raw = (to - from) / 7, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(each => each * power).find(each => each >= raw);
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
      const x = LEFT + (tick - from) * scale;
      add("line", { class: "grid", x1: x, x2: x, y1: TOP - 4, y2: TOP + lanes.length * HEIGHT });
      add("text", { class: "tick", x, y: 12, "text-anchor": x > WIDTH - 40 ? "end" : "middle" }, time(tick));
    }
    lanes.forEach((lane, i) => add("text", { class: "tick", x: LEFT - 8, y: TOP + i * HEIGHT + 15, "text-anchor": "end" },
      `rank ${lane.rank} ${lane.where}`));
    let drawn = 0;
    const reached = lanes.map(() => -1);  // what would lie within a bar's half pixel is left out
    bars.forEach((bar, index) => {
      if (bar.begin + bar.us < from || bar.begin > to) return;
      const left = Math.max(LEFT, LEFT + (bar.begin - from) * scale);
      const right = Math.min(WIDTH, LEFT + (bar.begin + bar.us - from) * scale);
      if (right < reached[bar.lane] + 0.5 && right - left < 0.5) return;
      reached[bar.lane] = right;
      drawn++;
      add("rect", { class: "span " + colour(bar.span), x: left, y: TOP + bar.lane * HEIGHT + 3,
        width: Math.max(0.5, right - left), height: HEIGHT - 6, rx: 2, "data-bar": index });
    });
    line.dataset.bars = bars.length;
    line.dataset.drawn = drawn;
  }

  function move(newFrom, newTo) {
    const width = Math.min(Math.max(newTo - newFrom, 0.5), end - first);
    from = Math.max(first, Math.min(newFrom, end - width));
    to = from + width;
    draw();
  }
  const place = event => {
    const box = line.getBoundingClientRect();
    return Math.max(0, ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT));
  };
  line.addEventListener("wheel", event => {
    event.preventDefault();
    const at = from + (to - from) * place(event), factor = Math.exp(event.deltaY * 0.0015);
    move(at - (at - from) * factor, at + (to - at) * factor);
  }, { passive: false });
  line.addEventListener("keydown", event => {
    const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (side === undefined) return;
    event.preventDefault();
    move(from + side * (to - from) / 4, to + side * (to - from) / 4);
  });
  let held = null;
  line.addEventListener("pointerdown", event => { held = { at: place(event), from, to }; });
  addEventListener("pointerup", () => { held = null; });
  line.addEventListener("pointermove", event => {
    if (held !== null) {
      const by = (held.at - place(event)) * (held.to - held.from);
      move(held.from + by, held.to + by);
      return;
    }
    const index = event.target.dataset.bar;
    if (index === undefined) return hide();
    const { span, us, begin, lane } = bars[index];
    const rows = span.bytes === undefined ? "" : `\n${span.tokens} tokens, ${span.bytes.toLocaleString("en")} bytes`;
    show(event, `rank ${span.rank}, ${lanes[lane].where}: ${span.name} ${span.number}\n${time(us)}, at ${time(begin)}${rows}`);
  });
  line.addEventListener("pointerleave", hide);
  document.getElementById("whole").addEventListener("click", () => move(first, end));
  document.getElementById("in").addEventListener("click", () => move(from + (to - from) / 4, to - (to - from) / 4));
  document.getElementById("out").addEventListener("click", () => move(from - (to - from) / 2, to + (to - from) / 2));
  draw();
})();
