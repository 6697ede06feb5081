// An image for an input of the shape N×1×H×W or N×3×H×W: a dropped file, or a drawing for small grey ones.

import { el } from "./dom.js";

const DATATYPES = ["FP16", "BF16", "FP32", "FP64", "UINT8"];
const LARGEST_DRAWING = 64;
const PAD = 192;
const PEN = 24;

// Scalings: each converts a value from 0 to 1, with its channel, into a value for the model.
const SCALINGS = {
  "0 to 1": (value) => value,
  "-1 to 1": (value) => 2 * value - 1,
  "0 to 16": (value) => 16 * value,
  "0 to 255": (value) => Math.round(255 * value),
  "ImageNet mean and deviation": (value, channel) =>
    (value - [0.485, 0.456, 0.406][channel]) / [0.229, 0.224, 0.225][channel],
};

/** Whether an input accepts images. */
export function takesImages({ shape, datatype }) {
  return shape.length === 4 && [1, 3].includes(shape[1]) && DATATYPES.includes(datatype);
}

/** Create the fields for an image. `onTokens` receives the values whenever they change; `shapeOf` returns their shape. */
export function imageInput(tensor, shapeOf, onTokens) {
  const channels = tensor.shape[1];
  const isSmall = tensor.shape[3] > 0 && tensor.shape[3] <= LARGEST_DRAWING;
  const label = `Image for ${tensor.name}`;
  const scaling = el(
    "select",
    { "aria-label": `Scaling of ${tensor.name}` },
    Object.keys(SCALINGS)
      .filter((name) => channels === 3 || !name.startsWith("ImageNet"))
      .map((name) => el("option", { value: name }, name)),
  );
  scaling.value = tensor.datatype === "UINT8" ? "0 to 255" : channels === 1 && tensor.shape[3] === 8 ? "0 to 16" : "0 to 1";
  const inverted = el("input", { type: "checkbox" });
  const file = el("input", { type: "file", accept: "image/*", "aria-label": label });
  const preview = el("canvas", { class: "preview", role: "img", "aria-label": `Preview of ${tensor.name}` });
  const status = el("span", { role: "status" });
  let source = null; // the chosen image, or the drawing

  const update = () => {
    if (source === null) return;
    try {
      const [rows, , height, width] = shapeOf();
      const pixels = pixelsOf(source, width, height, preview);
      onTokens(valuesOf(pixels, rows, channels, width * height, SCALINGS[scaling.value], inverted.checked, tensor.datatype));
      status.textContent = `${width} × ${height}`;
    } catch (error) {
      status.textContent = error.message;
    }
  };
  const take = async (chosen) => {
    if (!chosen) return;
    try {
      const bitmap = await createImageBitmap(chosen);
      source = { image: bitmap, area: squareOf(bitmap.width, bitmap.height, shapeOf()) };
      update();
    } catch {
      status.textContent = "this file is no image that the browser can read";
    }
  };
  file.addEventListener("change", () => take(file.files[0]));
  scaling.addEventListener("change", update);
  inverted.addEventListener("change", update);
  const drop = el("div", { class: "drop" }, el("span", {}, "Drop an image here, or choose one: "), file);
  drop.addEventListener("dragover", (event) => event.preventDefault());
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    take(event.dataTransfer.files[0]);
  });
  const drawn = (canvas, area) => {
    source = area ? { image: canvas, area, isDrawn: true } : null;
    update();
  };
  return el(
    "div",
    { class: "image" },
    drop,
    channels === 1 && isSmall ? drawingPad(tensor.name, drawn) : null,
    el(
      "p",
      { class: "row" },
      el("label", {}, "Values ", scaling),
      el("label", {}, inverted, " Inverted"),
      preview,
      status,
    ),
  );
}

/** Create a pad for drawing. `onDrawn` receives the pad and the area of the ink after each stroke. */
function drawingPad(name, onDrawn) {
  const pad = el("canvas", { class: "pad", width: PAD, height: PAD, "aria-label": `Drawing for ${name}`, role: "img" });
  const context = pad.getContext("2d", { willReadFrequently: true });
  const clear = () => {
    context.fillStyle = "#000";
    context.fillRect(0, 0, PAD, PAD);
    onDrawn(pad, null);
  };
  let last = null;
  const at = (event) => {
    const box = pad.getBoundingClientRect();
    return [((event.clientX - box.left) * PAD) / box.width, ((event.clientY - box.top) * PAD) / box.height];
  };
  const draw = (event) => {
    const here = at(event);
    context.strokeStyle = "#fff";
    context.lineWidth = PEN;
    context.lineCap = "round";
    context.beginPath();
    context.moveTo(...last);
    context.lineTo(...here);
    context.stroke();
    last = here;
  };
  pad.addEventListener("pointerdown", (event) => {
    pad.setPointerCapture(event.pointerId);
    last = at(event);
    draw(event);
  });
  pad.addEventListener("pointermove", (event) => last && draw(event));
  pad.addEventListener("pointerup", () => {
    last = null;
    onDrawn(pad, inkOf(context));
  });
  context.fillRect(0, 0, PAD, PAD);
  const button = el("button", { type: "button", onclick: clear }, "Clear the drawing");
  return el("div", {}, el("p", {}, "Or draw here:"), pad, el("p", {}, button));
}

/** Return the square around the ink, because scanned digits fill their image; null without ink. */
function inkOf(context) {
  const { data } = context.getImageData(0, 0, PAD, PAD);
  let [left, top, right, bottom] = [PAD, PAD, -1, -1];
  for (let index = 0; index < PAD * PAD; index += 1) {
    if (data[4 * index] < 64) continue;
    const [x, y] = [index % PAD, Math.floor(index / PAD)];
    [left, top, right, bottom] = [Math.min(left, x), Math.min(top, y), Math.max(right, x), Math.max(bottom, y)];
  }
  if (right < 0) return null;
  const side = Math.max(right - left, bottom - top) + 1;
  return [(left + right + 1 - side) / 2, (top + bottom + 1 - side) / 2, side, side];
}

/** Return the middle of an image, with the proportions of the given shape. */
function squareOf(width, height, [, , tall, wide]) {
  const scale = Math.min(width / wide, height / tall);
  return [(width - wide * scale) / 2, (height - tall * scale) / 2, wide * scale, tall * scale];
}

function pixelsOf({ image, area }, width, height, preview) {
  // Halve the size step by step: drawing a large area into a few pixels at once would skip most pixels.
  let [canvas, box] = [image, area];
  for (let scale = 2 ** Math.floor(Math.log2(Math.max(1, area[2] / width))); scale >= 1; scale /= 2) {
    const next = scale === 1 ? preview : document.createElement("canvas");
    [next.width, next.height] = [width * scale, height * scale];
    const context = next.getContext("2d", { willReadFrequently: true });
    context.imageSmoothingQuality = "high";
    context.fillStyle = "#000";
    context.fillRect(0, 0, next.width, next.height);
    context.drawImage(canvas, ...box, 0, 0, next.width, next.height);
    [canvas, box] = [next, [0, 0, next.width, next.height]];
  }
  return preview.getContext("2d").getImageData(0, 0, width, height).data;
}

/** Return the tokens of all rows in the order N×C×H×W. All rows hold the same image. */
function valuesOf(pixels, rows, channels, area, scale, isInverted, datatype) {
  const row = [];
  for (let channel = 0; channel < channels; channel += 1) {
    for (let index = 0; index < area; index += 1) {
      const at = 4 * index;
      const level = channels === 3 ? pixels[at + channel] : 0.299 * pixels[at] + 0.587 * pixels[at + 1] + 0.114 * pixels[at + 2];
      const value = scale(isInverted ? 1 - level / 255 : level / 255, channel);
      row.push(datatype === "UINT8" ? String(Math.max(0, Math.round(value))) : String(Number(value.toFixed(5))));
    }
  }
  return Array.from({ length: rows }, () => row).flat();
}
