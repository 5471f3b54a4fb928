// Two engines without a model, for tests of KvConnectors.
#include "tests/kvtransfer/kv_engines.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace baton::kvtransfer {
namespace {

constexpr std::byte kCanary{0xC5};

// Byte `i` of a head of a block.
std::byte content(KvRequestId request, uint32_t layer, uint32_t index, uint32_t head, uint32_t i) {
  uint64_t x = request * 0x9E3779B97F4A7C15u + layer * 0xC2B2AE3D27D4EB4Fu +
               index * 0x165667B19E3779F9u + head * 0x27D4EB2F165667C5u + i / 8;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x ^= x >> 29;
  return static_cast<std::byte>(x >> (i % 8 * 8));
}

}  // namespace

KvLayout test_layout(uint32_t blocks, uint32_t first_head, uint32_t heads) {
  KvLayout layout = KvLayout::dense(6, blocks, kTestBlockTokens, heads, 200, "test");
  layout.total_heads = 8;
  layout.first_head = first_head;
  return layout;
}

TestCache::TestCache(KvConnector& connector, const KvLayout& layout) : layout_(layout) {
  absl::StatusOr<void*> base = connector.allocate_cache(layout);
  if (!base.ok()) std::abort();
  base_ = static_cast<std::byte*>(*base);
  for (uint32_t block = 0; block < layout.blocks; ++block) {
    free_.push_back(block);
    paint(block);
  }
}

std::byte* TestCache::at(uint32_t block, uint32_t layer, uint32_t head) const {
  return base_ + layer * layout_.layer_stride + block * layout_.block_stride +
         head * layout_.head_stride;
}

void TestCache::paint(uint32_t block) {
  for (uint32_t layer = 0; layer < layout_.layers; ++layer) {
    for (uint32_t head = 0; head < layout_.heads; ++head) {
      std::fill_n(at(block, layer, head), layout_.head_bytes, kCanary);
    }
  }
}

std::vector<uint32_t> TestCache::allocate(size_t count, std::mt19937& random) {
  if (count > free_.size()) return {};
  if (random() % 2 == 0) std::shuffle(free_.begin(), free_.end(), random);
  std::vector<uint32_t> blocks(free_.end() - static_cast<std::ptrdiff_t>(count), free_.end());
  free_.resize(free_.size() - count);
  return blocks;
}

void TestCache::free(const std::vector<uint32_t>& blocks) {
  for (uint32_t block : blocks) {
    paint(block);
    free_.push_back(block);
  }
}

void TestCache::fill(uint32_t block, uint32_t layer, KvRequestId request, uint32_t index) {
  for (uint32_t head = 0; head < layout_.heads; ++head) {
    std::byte* bytes = at(block, layer, head);
    for (uint32_t i = 0; i < layout_.head_bytes; ++i) {
      bytes[i] = content(request, layer, index, layout_.first_head + head, i);
    }
  }
}

bool TestCache::holds(uint32_t block, uint32_t layer, KvRequestId request, uint32_t index) const {
  for (uint32_t head = 0; head < layout_.heads; ++head) {
    const std::byte* bytes = at(block, layer, head);
    for (uint32_t i = 0; i < layout_.head_bytes; ++i) {
      if (bytes[i] != content(request, layer, index, layout_.first_head + head, i)) return false;
    }
  }
  return true;
}

size_t TestCache::damaged() const {
  size_t bytes = 0;
  for (uint32_t block : free_) {
    for (uint32_t layer = 0; layer < layout_.layers; ++layer) {
      for (uint32_t head = 0; head < layout_.heads; ++head) {
        const std::byte* begin = at(block, layer, head);
        bytes += layout_.head_bytes -
                 static_cast<size_t>(std::count(begin, begin + layout_.head_bytes, kCanary));
      }
    }
  }
  return bytes;
}

// --- prefill -------------------------------------------------------------------------------------

void TestPrefill::step() {
  connector_.progress();
  while (auto job = connector_.next_job()) {
    ++seen_;
    queue_.push_back(*std::move(job));
  }
  while (!queue_.empty()) {
    const size_t blocks = cache_.layout().blocks_for(queue_.front().tokens.size());
    Job job;
    job.blocks = cache_.allocate(blocks, random_);
    if (job.blocks.empty()) break;
    job.job = std::move(queue_.front());
    queue_.erase(queue_.begin());
    jobs_.push_back(std::move(job));
  }
  if (!jobs_.empty()) compute(jobs_[random_() % jobs_.size()]);
  std::erase_if(jobs_, [&](Job& job) {
    if (!job.finished || !connector_.is_saved(job.job.job)) return false;
    cache_.free(job.blocks);
    return true;
  });
}

void TestPrefill::finish(Job& job, const absl::Status& outcome) {
  connector_.finish_job(job.job.job, outcome);
  job.finished = true;
}

void TestPrefill::compute(Job& job) {
  if (job.finished) return;
  if (!connector_.is_wanted(job.job.job)) {
    ++unwanted_;
    return finish(job, absl::CancelledError("not wanted"));
  }
  if (!refusal_.ok()) return finish(job, refusal_);
  const auto blocks = static_cast<uint32_t>(job.blocks.size());
  if (job.chunk_end == job.chunk_begin) {
    job.chunk_end = std::min<uint32_t>(blocks, job.chunk_begin + 1 + random_() % 5);
  }
  if (job.layer >= stop_before_layer_ && job.chunk_end == blocks) return;
  for (uint32_t i = job.chunk_begin; i < job.chunk_end; ++i) {
    cache_.fill(job.blocks[i], job.layer, job.job.request, i);
  }
  // Now and then, blocks that were handed over before.
  const uint32_t begin = random_() % 4 == 0 ? 0 : job.chunk_begin;
  const uint32_t end = forget_a_block_ && job.chunk_end == blocks ? blocks - 1 : job.chunk_end;
  const absl::Span<const uint32_t> all(job.blocks);
  const absl::Status status =
      connector_.save_layer(job.job.job, job.layer, begin, all.subspan(begin, end - begin));
  // Decode may have given the job up a moment ago.
  if (!status.ok() && !absl::IsCancelled(status)) std::abort();
  if (++job.layer < cache_.layout().layers) return;
  job.layer = 0;
  job.chunk_begin = job.chunk_end;
  if (job.chunk_end == blocks) finish(job, absl::OkStatus());
}

// --- decode --------------------------------------------------------------------------------------

absl::Status TestDecode::start(KvRequestId id, const std::string& prefill, uint32_t tokens,
                               uint32_t first_token, Time timeout) {
  KvLoad load;
  load.id = id;
  load.prefill = prefill;
  for (uint32_t i = 0; i < tokens; ++i) load.tokens.push_back(static_cast<int32_t>(i));
  load.first_token = first_token;
  load.timeout = timeout;
  TestLoad record;
  record.first_block = first_token / kTestBlockTokens;
  record.blocks = cache_.allocate(cache_.layout().blocks_for(tokens) - record.first_block, random_);
  load.blocks = record.blocks;
  absl::Status status = connector_.start_load(std::move(load));
  if (status.ok()) {
    loads_[id] = std::move(record);
  } else {
    cache_.free(record.blocks);
  }
  return status;
}

void TestDecode::cancel(KvRequestId id, uint32_t when_layers) {
  loads_.at(id).cancel = true;
  loads_.at(id).cancel_at = when_layers;
}

void TestDecode::step() {
  connector_.progress();
  for (auto& [id, load] : loads_) {
    if (load.state == TestLoad::State::kEnded) continue;
    if (load.state == TestLoad::State::kOpen) {
      const uint32_t here = connector_.layers_loaded(id);
      for (; load.verified < here; ++load.verified) {
        for (size_t i = 0; i < load.blocks.size(); ++i) {
          const auto index = load.first_block + static_cast<uint32_t>(i);
          load.wrong |= !cache_.holds(load.blocks[i], load.verified, id, index);
        }
      }
      load.status = connector_.load_status(id);
      const bool complete = load.verified == cache_.layout().layers;
      const bool cancel = load.cancel && load.verified >= load.cancel_at;
      if (!complete && load.status.ok() && !cancel) continue;
      if (!complete && load.status.ok()) load.status = absl::CancelledError("by the test");
      load.state = TestLoad::State::kEnding;
    }
    if (!connector_.end_load(id)) continue;
    cache_.free(load.blocks);
    load.state = TestLoad::State::kEnded;
  }
}

size_t TestDecode::open() const {
  return static_cast<size_t>(std::count_if(loads_.begin(), loads_.end(), [](const auto& entry) {
    return entry.second.state != TestLoad::State::kEnded;
  }));
}

}  // namespace baton::kvtransfer
