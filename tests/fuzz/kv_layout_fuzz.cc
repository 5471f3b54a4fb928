// Fuzzes the layouts that peers send, alone and with the addresses of their buffers: what decodes
// is checked, survives being sent again, and can be planned against in both directions; every move
// of such a plan stays inside the buffers.

#include "kvtransfer/agent_kv.h"
#include "kvtransfer/kv_plan.h"
#include "kvtransfer/plans/kv_placement_body.h"
#include "tests/std.h"

namespace {

using namespace baton::kvtransfer;

// All of the first tokens that both sides could hold.
void walk(const KvPlan& plan) {
  for (size_t part = 0; part < plan.parts().size(); ++part) {
    const KvPart& p = plan.parts()[part];
    const KvGroup& from = plan.source().groups[p.source_group];
    const KvGroup& to = plan.target().groups[p.target_group];
    std::vector<uint32_t> pages(8);
    std::iota(pages.begin(), pages.end(), 0u);
    const uint64_t tokens = std::min(uint64_t{std::min(from.blocks, 8u)} * from.block_tokens,
                                     uint64_t{std::min(to.blocks, 8u)} * to.block_tokens);
    if (tokens / p.unit > 4096) continue;
    const std::vector<uint32_t> here(pages.begin(), pages.begin() + std::min(from.blocks, 8u));
    const std::vector<uint32_t> there(pages.begin(), pages.begin() + std::min(to.blocks, 8u));
    const auto status = plan.for_each_move(
        part, {0, tokens}, {0, here}, {0, there}, {0, 2}, [&](const KvMove& move) {
          const uint64_t source = plan.source().buffers[move.source_buffer].bytes;
          const uint64_t target = plan.target().buffers[move.target_buffer].bytes;
          if (move.source.bytes() != move.target.bytes()) std::abort();
          if (!move.source.check(source, "source").ok()) std::abort();
          if (!move.target.check(target, "target").ok()) std::abort();
          return absl::OkStatus();
        });
    if (!status.ok()) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  KvPlacement::decode(bytes).IgnoreError();
  if (const auto place = decode_placement_body(bytes); place.ok()) {
    const auto again = KvPlacement::decode(place->encode());
    if (!again.ok() || again->layout != place->layout || again->addresses != place->addresses) {
      std::abort();
    }
  }
  const auto layout = KvLayout::decode(bytes);
  if (!layout.ok()) return 0;
  if (!layout->check().ok() || layout->layers() > KvLayout::kMaxLayers) std::abort();
  const auto again = KvLayout::decode(layout->encode());
  if (!again.ok() || *again != *layout) std::abort();
  KvLayout ours = KvLayout::transposed_keys(
      {.layers = 2, .blocks = 8, .block_tokens = 16, .total_heads = 2, .heads = 2, .head_size = 4});
  ours.model = layout->model;
  ours.format = layout->format;
  for (const auto& plan :
       {KvPlan::make(ours, *layout), KvPlan::make(*layout, ours), KvPlan::make(*layout, *layout)}) {
    if (plan.ok()) walk(*plan);
  }
  return 0;
}
