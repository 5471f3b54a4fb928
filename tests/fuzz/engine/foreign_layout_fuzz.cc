// Fuzzes what another engine says of its blocks: what is taken says itself the same, and a block of
// it can be converted to and fro without a byte beyond.

#include "engine/files/json_fields.h"
#include "engine/handoff/foreign_layout.h"
#include "tests/fuzz/expect.h"
#include "tests/std.h"

using baton::engine::KvCache;
using baton::engine::KvGeometry;
using baton::engine::parse_json;
using baton::engine::handoff::ForeignLayout;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto said = parse_json({reinterpret_cast<const char*>(data), size}, "a layout");
  if (!said.ok()) return 0;
  auto layout = ForeignLayout::parse(*said);
  if (!layout.ok()) return 0;
  const auto again = ForeignLayout::parse(layout->say());
  expect(again.ok() && *again == *layout);
  const KvGeometry geometry{.layers = static_cast<int>(layout->layers.size()),
                            .kv_heads = static_cast<int>(layout->heads),
                            .head_dim = static_cast<int>(layout->head_size)};
  if (!layout->place(geometry, layout->total_heads, 1, 0).ok() || layout->bytes > 1 << 20) return 0;
  const size_t blocks = (layout->block_tokens + 15) / 16;
  std::vector<uint16_t> memory(geometry.cache_bytes(blocks) / 2);
  std::iota(memory.begin(), memory.end(), uint16_t{0});
  const KvCache cache(geometry, memory.data(), blocks);
  std::vector<uint32_t> table(blocks);
  std::iota(table.begin(), table.end(), 0u);
  std::vector<std::byte> block(layout->bytes);
  const size_t tokens = layout->block_tokens;
  write_block(*layout, block.data(), 0, cache, 0, {.begin = 0, .end = tokens, .blocks = table});
  read_block(*layout, block.data(), 0, cache, 0, {.begin = 0, .end = tokens, .blocks = table});
  return 0;
}
