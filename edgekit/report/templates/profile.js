{% include "page.js" %}

for (const holder of document.querySelectorAll(".timeline")) {
  const data = JSON.parse(holder.querySelector("script").textContent);
  const { spans, names, rows, end } = data;
  const canvas = holder.querySelector("canvas");
  const note = holder.querySelector(".note");
  const idle = note.textContent;
  const count = spans.length / 4;
  const height = Math.min(28, Math.max(10, 160 / rows)), rowGap = 2;
  let from = 0, to = end, widest = 0;
  for (let i = 0; i < count; i++) widest = Math.max(widest, spans[4 * i + 2]);
  const draw = () => {
    const width = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(width * ratio));
    canvas.height = Math.round((rows * (height + rowGap) + 18) * ratio);
    canvas.style.height = canvas.height / ratio + "px";
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const scale = width / (to - from);
    // Where many kernels share a pixel, one stands for them: drawing each would take long and show no more.
    const last = new Array(rows).fill(-1);
    for (let i = first(from - widest); i < count && spans[4 * i + 1] <= to; i++) {
      const x = (spans[4 * i + 1] - from) * scale, wide = spans[4 * i + 2] * scale, row = spans[4 * i + 3];
      const right = Math.max(x + wide, Math.floor(x) + 1);
      if (right <= last[row]) continue;
      last[row] = Math.max(right, last[row]);
      pen.fillStyle = data.hues[spans[4 * i]];
      pen.fillRect(x, row * (height + rowGap), Math.max(0.8, wide - 0.4), height);
    }
    pen.fillStyle = getComputedStyle(document.body).color;
    pen.font = "11px system-ui, sans-serif";
    const step = Math.pow(10, Math.floor(Math.log10((to - from) / Math.max(2, width / 160))));
    const tick = step * ((to - from) / step > (width / 80) * 5 ? 10 : (to - from) / step > (width / 80) * 2 ? 5 : 2);
    for (let at = Math.ceil(from / tick) * tick; at <= to; at += tick) {
      const x = (at - from) * scale;
      pen.fillRect(x, rows * (height + rowGap), 1, 4);
      pen.fillText((at / 1000).toPrecision(4).replace(/\.?0+$/, "") + " ms", x + 3, rows * (height + rowGap) + 13);
    }
  };
  const first = (time) => {
    let low = 0, high = count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[4 * middle + 1] < time) low = middle + 1; else high = middle;
    }
    return low;
  };
  const show = (start, stop) => {
    const length = Math.min(end, Math.max(10, stop - start));
    from = Math.min(Math.max(0, start), end - length);
    to = from + length;
    draw();
  };
  const zoom = (factor, share) => {
    const at = from + share * (to - from);
    show(at - (at - from) * factor, at + (to - at) * factor);
  };
  const pan = (share) => show(from + share * (to - from), to + share * (to - from));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX / canvas.clientWidth);
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (event) => { held = event.offsetX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (held !== null) {
      pan((held - event.offsetX) / canvas.clientWidth);
      held = event.offsetX;
      return;
    }
    const time = from + (event.offsetX / canvas.clientWidth) * (to - from);
    const row = Math.floor(event.offsetY / (height + rowGap));
    let found = -1;
    for (let i = first(time - widest); i < count && spans[4 * i + 1] <= time; i++) {
      if (spans[4 * i + 3] === row && spans[4 * i + 1] + spans[4 * i + 2] >= time) found = i;
    }
    note.textContent = found < 0 ? idle : names[spans[4 * found]] + ": " + spans[4 * found + 2] / 1000 + " ms";
  });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5, 0.5), "-": () => zoom(2, 0.5), 0: () => show(0, end) };
    if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
  });
  for (const button of holder.querySelectorAll("button")) {
    button.addEventListener("click", () => (button.dataset.zoom === "all" ? show(0, end) : zoom(Number(button.dataset.zoom), 0.5)));
  }
  show(0, data.runs > 0 ? end / data.runs : end);
  new ResizeObserver(draw).observe(holder);
}
