// Torch's tensors and options as calls of libbaton, checked, with buffers that the work keeps.
#pragma once

#include <array>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device.h"
#include "elements.h"
#include "work.h"

namespace baton::c10d_backend {

using Tensors = std::vector<at::Tensor>;

inline at::Tensor& one(Tensors& tensors, const char* call) {
  TORCH_CHECK(tensors.size() == 1, "backend baton: ", call, " takes one tensor, not ",
              tensors.size());
  return tensors[0];
}

inline void check_dense(const at::Tensor& tensor, const char* call) {
  TORCH_CHECK(tensor.device().is_cpu() || is_of_cuda(tensor.device()), "backend baton: ", call,
              " got a tensor on ", tensor.device(), ", and moves those of the CPU and of CUDA ",
              "devices. Another backend for those beside this one: ",
              "init_process_group(\"cpu:baton,xpu:xccl\"), say");
  TORCH_CHECK(!tensor.is_sparse() && tensor.layout() == at::kStrided, "backend baton: ", call,
              " takes dense tensors, and this one is ", tensor.layout());
}

// Tensors in a row in one piece of memory: their own if they lie so, else a temporary one.
struct Row {
  Row(const Tensors& tensors, const char* call, at::ScalarType type) : tensors(tensors) {
    const char* next = nullptr;  // where the next one has to begin
    for (const at::Tensor& tensor : tensors) {
      check_dense(tensor, call);
      TORCH_CHECK(tensor.scalar_type() == type, "backend baton: ", call, " got tensors of ",
                  c10::toString(type), " and of ", c10::toString(tensor.scalar_type()));
      counts.push_back(tensor.numel());
      offsets.push_back(total);
      total += tensor.numel();
      if (tensor.numel() == 0) continue;  // which has no address
      const auto* data = static_cast<const char*>(tensor.const_data_ptr());
      if (next == nullptr) memory = tensor;
      // Neighbours by chance belong to different storages, of which only one would be kept.
      const bool follows = next == nullptr || (data == next && tensor.is_alias_of(memory));
      if (!tensor.is_contiguous() || !follows) apart = true;
      next = data + tensor.nbytes();
    }
    const std::array<int64_t, 1> all{static_cast<int64_t>(total)}, step{1};
    const auto like = tensors.empty() ? at::TensorOptions() : tensors[0].options();
    memory = apart || !memory.defined() ? at::empty(all, like.dtype(type))
                                        : memory.as_strided(all, step, memory.storage_offset());
  }
  void fill() const {
    for (size_t i = 0; apart && i < tensors.size(); ++i) part(i).copy_(tensors[i]);
  }
  void empty_into_tensors() const {
    for (size_t i = 0; i < tensors.size(); ++i) at::Tensor(tensors[i]).copy_(part(i));
  }
  at::Tensor part(size_t i) const {
    return memory.narrow(0, static_cast<int64_t>(offsets[i] / each), tensors[i].numel())
        .view(tensors[i].sizes());
  }
  // Counts in Baton's elements, of which `by` make one of torch's.
  void scale(size_t by) {
    each = by;
    for (size_t& count : counts) count *= by;
    for (size_t& offset : offsets) offset *= by;
  }

  Tensors tensors;
  bool apart = false;
  at::Tensor memory;
  std::vector<size_t> counts, offsets;  // in elements
  size_t each = 1;
  size_t total = 0;
};

class CallMaker : public ::c10d::Backend {
 protected:
  using Backend::Backend;

  // --- what a call wants of its arguments --------------------------------------------------------
  void check_root(int64_t root, const char* call) const {
    TORCH_CHECK_VALUE(root >= 0 && root < size_, "backend baton: ", call, " got root rank ", root,
                      " in a group of ", size_);
  }
  void check_list(const Tensors& list, const char* call) const {
    TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(size_), "backend baton: ", call,
                      " got a list of ", list.size(), " tensors in a group of ", size_, " ranks");
  }
  static void check_as_many(const Tensors& outputs, const Tensors& inputs, const char* call) {
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "backend baton: ", call, " got ",
                      inputs.size(), " inputs and ", outputs.size(), " outputs");
  }
  // `large` is `small` once for each rank.
  void check_times(const at::Tensor& large, const at::Tensor& small, const char* call) const {
    TORCH_CHECK(large.scalar_type() == small.scalar_type(), "backend baton: ", call, " got ",
                c10::toString(small.scalar_type()), " and ", c10::toString(large.scalar_type()),
                ": both must have one type");
    TORCH_CHECK_VALUE(large.numel() == small.numel() * size_, "backend baton: ", call,
                      " wants one tensor to be ", size_, " times the other's size, and got ",
                      large.numel(), " and ", small.numel(), " elements");
  }
  // A list of one tensor for each rank, each as large as `part`.
  void check_parts(const Tensors& list, const at::Tensor& part, const char* call) const {
    check_list(list, call);
    for (const at::Tensor& tensor : list) {
      TORCH_CHECK_VALUE(tensor.numel() == part.numel(), "backend baton: ", call,
                        " wants a list of tensors of ", part.numel(), " elements, and one has ",
                        tensor.numel());
    }
  }

  // Rows of `tensor`, so many for each rank; without numbers as many for each.
  Tensors rows_of(const at::Tensor& tensor, const std::vector<int64_t>& sizes) const {
    if (!sizes.empty()) return tensor.split_with_sizes(sizes);
    return tensor.split_with_sizes(std::vector<int64_t>(size_, tensor.size(0) / size_));
  }

  // --- calls
  // ---------------------------------------------------------------------------------------
  static void unpack(const WorkPtr& work, const at::Tensor& to, const at::Tensor& from) {
    if (!from.is_same(to)) work->then([to, from] { at::Tensor(to).copy_(from); });
  }

  static baton_call moving(int32_t kind, const at::Tensor& tensor, const WorkPtr& work) {
    const Moved how = moved(tensor.scalar_type());
    baton_call call = BATON_CALL_INIT;
    call.kind = kind;
    call.type = how.type;
    call.count = tensor.numel() * how.each;
    work->keep(tensor);
    return call;
  }
  static baton_call reducing(int32_t kind, const at::Tensor& packed, const Reduced& how,
                             const WorkPtr& work) {
    baton_call call = BATON_CALL_INIT;
    call.kind = kind;
    call.type = how.type;
    call.op = how.op;
    call.count = packed.numel() * how.each;
    work->keep(packed);
    if (how.factor.defined()) {
      call.factor = how.factor.const_data_ptr();
      work->keep(how.factor);
    }
    return call;
  }

  baton_call reducing_all(const at::Tensor& tensor, const ::c10d::AllreduceOptions& opts,
                          const WorkPtr& work) {
    check_dense(tensor, "all_reduce");
    const Reduced how = reduced(tensor.scalar_type(), opts.reduceOp);
    const at::Tensor packed = tensor.to(how.as).contiguous();
    baton_call call = reducing(BATON_ALL_REDUCE, packed, how, work);
    call.in = call.out = packed.data_ptr();
    unpack(work, tensor, packed);
    return call;
  }

  baton_call gathering_single(const at::Tensor& output, const at::Tensor& input,
                              const WorkPtr& work) {
    check_dense(output, "all_gather_single");
    check_dense(input, "all_gather_single");
    check_times(output, input, "all_gather_single");
    const at::Tensor from = input.contiguous(), to = output.contiguous();
    baton_call call = moving(BATON_ALL_GATHER, from, work);
    call.in = from.const_data_ptr();
    call.out = to.data_ptr();
    work->keep(to);
    unpack(work, output, to);
    return call;
  }
  baton_call gathering(const Tensors& outputs, const at::Tensor& input, const WorkPtr& work) {
    check_list(outputs, "all_gather");
    check_dense(input, "all_gather");
    const bool even = std::all_of(outputs.begin(), outputs.end(), [&](const at::Tensor& output) {
      return output.numel() == input.numel();
    });
    const at::Tensor from = input.contiguous();
    baton_call call = moving(even ? BATON_ALL_GATHER : BATON_ALL_GATHER_V, from, work);
    call.in = from.const_data_ptr();
    if (even) {
      call.out = receiving(outputs, input, "all_gather", work);
      return call;
    }
    TORCH_CHECK_VALUE(outputs[rank_].numel() == input.numel(), "backend baton: all_gather got ",
                      input.numel(), " elements, and output ", rank_, " has ",
                      outputs[rank_].numel());
    auto row = std::make_shared<Row>(outputs, "all_gather", input.scalar_type());
    row->scale(moved(input.scalar_type()).each);
    work->keep(row->memory);
    call.out = row->memory.data_ptr();
    call.out_counts = row->counts.data();
    call.out_offsets = row->offsets.data();
    work->then([row] {
      if (row->apart) row->empty_into_tensors();
    });
    return call;
  }
  // Where a list of parts like `part` is received, which are told apart once they are there.
  void* receiving(const Tensors& list, const at::Tensor& part, const char* name,
                  const WorkPtr& work) const {
    check_parts(list, part, name);
    const Row row(list, name, part.scalar_type());
    work->keep(row.memory);
    if (row.apart) work->then([row] { row.empty_into_tensors(); });
    return row.memory.data_ptr();
  }
  baton_call scattering(const at::Tensor& output, const at::Tensor& row,
                        const ::c10d::ReduceScatterOptions& opts, const WorkPtr& work) {
    check_dense(output, "reduce_scatter");
    const Reduced how = reduced(output.scalar_type(), opts.reduceOp);
    const at::Tensor from = row.to(how.as), to = output.to(how.as).contiguous();
    baton_call call = reducing(BATON_REDUCE_SCATTER, to, how, work);
    call.in = from.const_data_ptr();
    call.out = to.data_ptr();
    work->keep(from);
    unpack(work, output, to);
    return call;
  }
  baton_call scattering_single(const at::Tensor& output, const at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& opts, const WorkPtr& work) {
    check_dense(input, "reduce_scatter_single");
    check_times(input, output, "reduce_scatter_single");
    return scattering(output, input.contiguous(), opts, work);
  }
  // One tensor to each rank and from each, of any sizes.
  baton_call exchanging(const Tensors& outputs, const Tensors& inputs, const char* name,
                        const WorkPtr& work) {
    auto to = std::make_shared<Row>(outputs, name, outputs[0].scalar_type());
    auto from = std::make_shared<Row>(inputs, name, outputs[0].scalar_type());
    from->fill();
    work->keep(to->memory);
    work->keep(from->memory);
    const Moved how = moved(outputs[0].scalar_type());
    to->scale(how.each);
    from->scale(how.each);
    baton_call call = BATON_CALL_INIT;
    call.kind = BATON_ALL_TO_ALL_V;
    call.type = how.type;
    call.in = from->memory.const_data_ptr();
    call.in_counts = from->counts.data();
    call.in_offsets = from->offsets.data();
    call.out = to->memory.data_ptr();
    call.out_counts = to->counts.data();
    call.out_offsets = to->offsets.data();
    work->then([to, from] {  // which are there until then
      if (to->apart) to->empty_into_tensors();
    });
    return call;
  }
};

}  // namespace baton::c10d_backend
