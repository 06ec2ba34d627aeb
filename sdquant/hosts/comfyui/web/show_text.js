// Shows the text of sdquant's nodes under them: ComfyUI draws the text of its own "Preview as Text" only.
import { app } from "../../scripts/app.js";
import { ComfyWidgets } from "../../scripts/widgets.js";

const NODES = ["SdquantInspect", "SdquantSaveDiffusionModel"];
const NAME = "sdquant_text";

function show(node, lines) {
  let widget = node.widgets?.find((one) => one.name === NAME);
  if (!widget) {
    widget = ComfyWidgets.STRING(node, NAME, ["STRING", { multiline: true }], app).widget;
    widget.serialize = false; // neither in the workflow nor among the inputs
    widget.options = { ...widget.options, serialize: false };
    widget.serializeValue = () => undefined;
    const field = widget.inputEl ?? widget.element;
    if (field) field.readOnly = true;
  }
  widget.value = lines.join("\n");
  const [width, height] = node.computeSize();
  node.setSize([Math.max(node.size[0], width, 320), Math.max(node.size[1], height, 40 + 18 * widget.value.split("\n").length)]);
  node.setDirtyCanvas?.(true, true);
}

app.registerExtension({
  name: "sdquant.ShowText",
  async beforeRegisterNodeDef(nodeType, nodeData) {
    if (!NODES.includes(nodeData.name)) return;
    const before = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (output) {
      before?.apply(this, arguments);
      if (output?.text?.length) show(this, output.text);
    };
  },
});
