"use strict";
// Draws the data from /events. All of it is inserted as text, never as markup: names, losses and sentences come from
// other members.
(function () {
  const POINTS = 512; // Of one curve, as in the node; beyond that every second one is dropped.
  const NAMED = 40; // Members named in the graph; more names would overlap.
  const KEPT = 100; // Sentences.
  const MIXED_S = 4; // The time for which a mix is drawn, fading.
  const COLUMNS = [
    ["member", (m) => m.id.slice(0, 8)], ["state", (m) => stateOf(m)], ["steps", (m) => whole(m.steps)],
    ["samples", (m) => whole(m.samples)], ["samples/s", (m) => short(m.samples_s)], ["loss", (m) => short(m.loss)], ["exchanges", (m) => whole(m.exchanges_done)],
    ["failed", (m) => whole(m.exchanges_failed)], ["distance", (m) => short(m.consensus_distance)],
    ["MB/s up", (m) => short(m.mb_s_sent)], ["MB/s down", (m) => short(m.mb_s_received)],
    ["mixed with", (m) => (m.mixed && m.mixed.length ? m.mixed[m.mixed.length - 1][0].slice(0, 8) : "-")],
    ["version", (m) => m.version || "-"], ["link", (m) => m.link || "-"], ["address", (m) => m.address || "-"],
  ];

  function known(value) { return typeof value === "number" && Number.isFinite(value); }
  function whole(value) { return known(value) ? Math.round(value).toLocaleString("en") : "-"; }
  function short(value) {
    if (!known(value)) return "-";
    return value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e6) ? value.toExponential(2) : value.toLocaleString("en", { maximumSignificantDigits: 4 });
  }
  function stateOf(member) {
    const state = member.state === "alive" && member.ready === false ? "joins" : member.state;
    return member.old && known(member.answered_s) ? `${state}, ${Math.round(member.answered_s)} s old` : state;
  }

  // Return each member's place on a circle, in order of ids, so that none moves when another's state changes.
  function layout(members) {
    const ids = members.map((m) => m.id).sort();
    const places = new Map();
    ids.forEach((id, index) => {
      const angle = (2 * Math.PI * index) / Math.max(1, ids.length) - Math.PI / 2;
      places.set(id, [100 * Math.cos(angle), 100 * Math.sin(angle)]);
    });
    return places;
  }

  // Return pairs that mixed within so many seconds, each once: [one, other, seconds ago], as either of them reports.
  function edges(members, within) {
    const found = new Map();
    const here = new Set(members.map((m) => m.id));
    for (const member of members) {
      for (const [other, , ago] of member.mixed || []) {
        const age = ago + (member.answered_s || 0);
        if (!known(ago) || !here.has(other) || other === member.id || !(age <= within)) continue;
        const pair = [member.id, other].sort();
        const key = pair.join();
        if (!found.has(key) || found.get(key)[2] > age) found.set(key, [...pair, age]);
      }
    }
    return [...found.values()];
  }

  function appended(points, point) {
    const last = points[points.length - 1];
    if (last && last[0] >= point[0]) return points;
    points.push(point);
    return points.length > POINTS ? points.filter((_, index) => index % 2 === 0) : points;
  }

  // A restarted member counts its steps from 0, and gets a new curve.
  function continued(points, point) {
    const last = points[points.length - 1];
    return last && point[0] < last[0] ? [point] : appended(points, point);
  }

  // The axis is logarithmic, so a loss of 0 or below cannot be drawn.
  function logarithmic(lines) {
    const values = lines.flat().filter(known);
    return values.length > 0 && values.every((value) => value > 0);
  }

  // Return the losses of all members over one axis, as a chart takes them, and the member of each curve.
  function aligned(losses) {
    const ids = [...losses.keys()].sort();
    const steps = [...new Set(ids.flatMap((id) => losses.get(id).map((point) => point[0])))].sort((a, b) => a - b);
    const at = new Map(steps.map((step, index) => [step, index]));
    const lines = ids.map((id) => {
      const line = new Array(steps.length).fill(undefined); // Gaps are spanned.
      for (const [step, loss] of losses.get(id)) line[at.get(step)] = loss;
      return line;
    });
    return { ids, data: [steps, ...lines] };
  }

  function summed(members) {
    const sums = new Map();
    for (const member of members) {
      for (const [reason, , count] of member.failures || []) sums.set(reason, (sums.get(reason) || 0) + (known(count) ? count : 0));
    }
    return [...sums].sort((a, b) => b[1] - a[1]);
  }

  const colours = new Map(); // In order of appearance, so that a member keeps its colour while the page is open.
  let coloured = 0;
  const COLOURS = 6, DASHES = [[], [10, 4], [3, 3], [12, 4, 3, 4]]; // As in the simulator's reports: dashes from the seventh on.
  function look(id) {
    if (!colours.has(id)) colours.set(id, coloured++);
    return lookOf(colours.get(id));
  }
  function lookOf(number) {
    return { colour: `--s${number % COLOURS}`, dash: DASHES[Math.floor(number / COLOURS) % DASHES.length] };
  }

  if (typeof module !== "undefined") { // For tests without a browser.
    module.exports = { layout, edges, appended, continued, logarithmic, aligned, summed, looks: (ids) => ids.map(look), short, whole, stateOf };
    return;
  }

  const $ = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const losses = new Map();
  let own = [], drawn = {};

  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }
  function shape(name, attributes) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }
  function rowOf(cells) {
    const row = element("tr");
    for (const cell of cells) row.append(element("td", cell));
    return row;
  }

  function drawTiles(state) {
    const me = state.members.find((m) => m.self) || {};
    const alive = state.members.filter((m) => m.state === "alive").length;
    const tiles = [
      [alive === 1 ? "member alive" : "members alive", whole(alive)], ["samples of the swarm", whole(me.swarm_samples)],
      ["samples/s, swarm", short(state.swarm_samples_s)], ["samples/s here", short(me.samples_s)], ["loss here", short(me.loss)],
      ["consensus distance", short(me.consensus_distance)], ["exchanges here", whole(me.exchanges_done)],
      ["steps between mixes", me.interval_steps ? `${whole(me.interval_steps)}, ${me.codec}` : me.codec || whole()],
      ["MB/s up", short(me.mb_s_sent)], ["MB/s down", short(me.mb_s_received)],
    ];
    $("tiles").replaceChildren(...tiles.map(([what, value]) => {
      const tile = element("div");
      tile.append(element("b", value), element("span", what));
      return tile;
    }));
  }

  function drawGraph(members) {
    const places = layout(members), parts = [], few = members.length <= NAMED;
    for (const [one, other, age] of edges(members, MIXED_S)) {
      const [x1, y1] = places.get(one), [x2, y2] = places.get(other);
      parts.push(shape("line", { x1, y1, x2, y2, "stroke-opacity": Math.max(0.1, 1 - age / MIXED_S).toFixed(2) }));
    }
    for (const member of members) {
      const [x, y] = places.get(member.id);
      const group = shape("g", { class: member.self ? "self" : "" });
      group.append(shape("circle", { cx: x, cy: y, r: few ? 8 : 3, class: member.ready === false && member.state === "alive" ? "waits" : member.state }));
      if (few) {
        const label = shape("text", { x, y: y > 0 ? y + 20 : y - 13 });
        label.textContent = member.id.slice(0, 8);
        group.append(label);
      }
      parts.push(group);
    }
    $("graph").replaceChildren(...parts);
  }

  function styled(variable) { return getComputedStyle(document.body).getPropertyValue(variable); }
  function line(label, { colour, dash }) {
    return { label, stroke: styled(colour), dash, width: 1.5, spanGaps: true, points: { show: false } };
  }

  function chart(name, series, data, axes) {
    const place = $(name), key = JSON.stringify([series.map((one) => one.label), Boolean(axes.log)]);
    const width = Math.max(200, place.clientWidth);
    if (drawn[name] && drawn[name].key === key) {
      if (drawn[name].plot.width !== width) drawn[name].plot.setSize({ width, height: 200 });
      drawn[name].plot.setData(data);
      return;
    }
    if (drawn[name]) drawn[name].plot.destroy();
    const ink = styled("--muted"), grid = styled("--grid");
    const axis = (more) => ({ stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, ...more });
    const plot = new uPlot({
      width, height: 200, series: [{ label: axes.time ? "time" : "step" }, ...series], scales: { x: { time: axes.time }, y: { distr: axes.log ? 3 : 1 } }, legend: { show: series.length <= 12 },
      axes: [axis({}), axis({ size: 60, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) })],
    }, data, place);
    drawn[name] = { key, plot };
  }

  function drawCharts() {
    const { ids, data } = aligned(losses);
    const log = logarithmic(data.slice(1));
    $("loss-scale").textContent = log ? ", logarithmic" : "";
    if (ids.length) chart("losses", ids.map((id) => line(id.slice(0, 8), look(id))), data, { time: false, log });
    if (!own.length) return;
    const column = (index) => own.map((point) => point[index]);
    chart("distance", [line("distance", lookOf(0))], [column(0), column(1)], { time: true });
    chart("paces", [line("this node", lookOf(0)), line("swarm", lookOf(1))], [column(0), column(4), column(5)], { time: true });
    chart("rates", [line("up", lookOf(0)), line("down", lookOf(1))], [column(0), column(2), column(3)], { time: true });
  }

  function drawMembers(state) {
    $("members").tHead.replaceChildren(element("tr"));
    $("members").tHead.rows[0].append(...COLUMNS.map(([head]) => element("th", head)));
    $("members").tBodies[0].replaceChildren(...state.members.map((member) => {
      const row = rowOf(COLUMNS.map(([, of]) => of(member)));
      row.className = `${member.old ? "old" : ""} ${member.self ? "self" : ""}`.trim();
      row.cells[1].className = member.state;
      return row;
    }));
    $("hidden").textContent = state.hidden ? `and ${whole(state.hidden)} more` : "";
    const failures = summed(state.members);
    $("failures").tBodies[0].replaceChildren(...(failures.length ? failures.map(([reason, count]) => rowOf([reason, whole(count)])) : [rowOf(["none"])]));
  }

  function show(state) {
    for (const member of state.members) {
      if (known(member.loss) && known(member.steps) && (losses.has(member.id) || losses.size < 64)) {
        losses.set(member.id, continued(losses.get(member.id) || [], [member.steps, member.loss]));
      }
    }
    for (const id of [...losses.keys()]) if (!state.members.some((m) => m.id === id)) { losses.delete(id); colours.delete(id); }
    for (const point of state.own) own = appended(own, point);
    $("health").textContent = state.health;
    $("health").className = state.healthy ? "good" : "bad";
    drawTiles(state);
    drawGraph(state.members);
    drawCharts();
    drawMembers(state);
  }

  const source = new EventSource("events");
  source.addEventListener("begin", (event) => {
    const begin = JSON.parse(event.data);
    $("swarm").textContent = begin.swarm;
    document.title = `gossip ${begin.swarm}`;
    losses.clear();
    for (const [id, points] of Object.entries(begin.losses)) losses.set(id, points);
    own = begin.own;
    $("sentences").replaceChildren();
    const rows = Object.entries(begin.settings).map((pair) => rowOf(pair));
    $("settings").tBodies[0].replaceChildren(...(rows.length ? rows : [rowOf(["all as by default"])]));
  });
  source.addEventListener("sentences", (event) => {
    for (const one of JSON.parse(event.data)) {
      const item = element("li");
      item.append(element("time", new Date(one.at * 1000).toLocaleTimeString()), element("span", one.text));
      $("sentences").prepend(item);
    }
    while ($("sentences").children.length > KEPT) $("sentences").lastChild.remove();
  });
  source.addEventListener("state", (event) => show(JSON.parse(event.data)));
  source.addEventListener("error", () => {
    $("health").textContent = "this node does not answer: it ended, or is out of reach";
    $("health").className = "bad";
  });
})();
