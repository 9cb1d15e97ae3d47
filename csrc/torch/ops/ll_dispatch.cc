#include "torch/ops/ll_dispatch.h"

#include "torch/ops/run.h"

namespace ep {
namespace {

void run_into(DispatchOutputs& outputs, LlDispatchParams& p, const InputTypes& row, const OnGroup& on,
              const Beside::Turn& turn) {
  if (receives(p.phase)) p.arrivals = on.registered->take_arrivals();
  if (p.arrivals.state != nullptr) p.arrivals.check(p.output);
  on.group.prepare(p);  // refuses what does not fit before memory is taken for it
  outputs.take(p, row, on.group, on.device);
  void* stream = on.registered->order.next_stream(on.device);
  on.group.run(p, stream);
  on.registered->order.note_before_signals(on.device, stream);
  turn.note_end();
}

}  // namespace

void run_dispatch(const at::Tensor& seq, const DispatchInputs& inputs, int64_t capacity, const DispatchConfig& config,
                  Phase phase, DispatchOutputs& outputs) {
  const OnGroup on(seq);
  const Beside::Turn turn = on.registered->beside.take();
  const OptionalTensor& scales = row_scales_of(inputs.scales, config.quant);
  const InputTypes row = check_inputs(inputs.x, scales, inputs.topk_idx, inputs.topk_weights, config.topk, on.device);
  LlDispatchParams p = dispatch_params(row, config, output_shape(on.group.num_ranks(), config, capacity));
  p.phase = phase;
  set_inputs(p, inputs.x, scales, inputs.topk_idx, inputs.topk_weights);
  p.tensor_scale = tensor_scale_of(inputs.scales, config.quant, on.device);
  run_into(outputs, p, row, on, turn);
}

void receive_dispatch(const at::Tensor& seq, const InputTypes& row, int64_t capacity, const DispatchConfig& config,
                      DispatchOutputs& outputs) {
  const OnGroup on(seq);
  const Beside::Turn turn = on.registered->beside.take();
  LlDispatchParams p = dispatch_params(row, config, output_shape(on.group.num_ranks(), config, capacity));
  p.phase = Phase::kRecv;
  run_into(outputs, p, row, on, turn);
}

}  // namespace ep
