// A serving engine of your own behind a KvConnector: prefill computes layer by layer, decode uses a
// layer as soon as it is here. Replace compute() and attend() by your model. Two threads stand for
// two workers; in two processes, only the address has to travel.
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "kvtransfer/baton_connector.h"

using namespace baton;
using namespace baton::kvtransfer;

namespace {

constexpr uint32_t kLayers = 4, kBlocks = 32, kBlockTokens = 16, kHeads = 2;
constexpr uint32_t kHeadBytes = 2 * kBlockTokens * 64 * 2;  // K and V, 16 tokens, 64 wide, bf16

// One worker of the engine: its cache lies in the connector's memory, [layer][block][head].
struct EngineWorker {
  KvLayout layout = KvLayout::dense(kLayers, kBlocks, kBlockTokens, kHeads, kHeadBytes, "mine v1");
  std::unique_ptr<KvConnector> connector;
  std::byte* cache = nullptr;

  explicit EngineWorker(const char* name) {
    BatonConnectorOptions options;
    options.worker.name = name;
    connector = make_baton_connector(options).value();
    cache = static_cast<std::byte*>(connector->allocate_cache(layout).value());
  }
  std::byte* block(uint32_t layer, uint32_t number) const {
    const KvField& field = layout.groups[0].fields[0];
    return cache + field.places[layer].offset + number * field.block_stride;
  }
};

// Stands for a layer of the model: what it writes depends on layer and tokens only.
void compute(const EngineWorker& worker, uint32_t layer, uint32_t block, int32_t first_token) {
  std::memset(worker.block(layer, block), int(layer * 50 + first_token), kHeads * kHeadBytes);
}
// Stands for attention over the layer's blocks: true if the keys and values are the right ones.
bool attend(const EngineWorker& worker, uint32_t layer, uint32_t block, int32_t first_token) {
  for (size_t i = 0; i < kHeads * kHeadBytes; ++i) {
    if (worker.block(layer, block)[i] != std::byte(layer * 50 + first_token)) return false;
  }
  return true;
}

// The prefill engine's loop, for one job.
void prefill(EngineWorker& worker) {
  KvConnector& kv = *worker.connector;
  std::optional<KvJob> job;
  while (!(job = kv.next_job())) kv.wait(std::chrono::milliseconds(100), -1);
  const size_t count = worker.layout.blocks_for(job->tokens.size());
  std::vector<uint32_t> blocks(count);
  for (uint32_t i = 0; i < count; ++i) blocks[i] = i;  // your block manager's choice

  for (uint32_t layer = 0; layer < kLayers && kv.is_wanted(job->job); ++layer) {
    for (uint32_t b : blocks) compute(worker, layer, b, job->tokens[b * kBlockTokens]);
    // Its pages leave now, while the next layer is computed.
    kv.save_layer(job->job, layer, 0, blocks).IgnoreError();
    kv.progress();
  }
  kv.finish_job(job->job, absl::OkStatus());
  while (!kv.is_saved(job->job)) kv.wait(std::chrono::milliseconds(100), -1);
  // From here on the blocks may be freed.
}

// The decode engine's side of one request: 0 if every layer was right.
int decode(EngineWorker& worker, const std::string& prefill_address) {
  KvConnector& kv = *worker.connector;
  KvLoad load{.id = 1, .prefill = prefill_address};
  for (int32_t token = 0; token < 3 * int32_t{kBlockTokens}; ++token) load.tokens.push_back(token);
  load.blocks = {9, 4, 17};  // free blocks of this worker, in any order
  const std::vector<int32_t> tokens = load.tokens;
  const std::vector<uint32_t> blocks = load.blocks;
  if (absl::Status status = kv.start_load(std::move(load)); !status.ok()) {
    return std::printf("decode: %s\n", status.ToString().c_str()), 1;
  }
  bool right = true;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    if (absl::Status status = kv.wait_for_layer(1, layer); !status.ok()) {
      std::printf("decode: computing the prompt here, because %s\n", status.ToString().c_str());
      right = false;
      break;
    }
    for (size_t i = 0; i < blocks.size(); ++i) {
      right = right && attend(worker, layer, blocks[i], tokens[i * kBlockTokens]);
    }
  }
  while (!kv.end_load(1)) kv.wait(std::chrono::milliseconds(100), -1);
  // From here on the blocks may be reused, also after a failure.
  const KvConnectorStats stats = kv.stats();
  std::printf("decode: %zu tokens in %u layers, %zu KB, %s\n  %s\n", tokens.size(), kLayers,
              size_t(stats.bytes_loaded / 1000), right ? "all right" : "WRONG",
              stats.route.c_str());
  return right ? 0 : 1;
}

}  // namespace

int main() {
  EngineWorker prefill_worker("prefill-0"), decode_worker("decode-0");
  const std::string address = prefill_worker.connector->address();
  std::thread thread([&] { prefill(prefill_worker); });
  const int result = decode(decode_worker, address);
  thread.join();
  return result;
}
