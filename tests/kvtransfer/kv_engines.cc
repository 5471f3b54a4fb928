// Two engines without a model, for tests of KvConnectors.
#include "tests/kvtransfer/kv_engines.h"

#include <iostream>

namespace baton::kvtransfer {
namespace {

constexpr std::byte kCanary{0xC5};

// What byte `i` of a row holds. A row is named by request, layer, token (or block), head and role.
std::byte content(uint64_t row, uint32_t i) {
  uint64_t x = row + i / 8 * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x ^= x >> 29;
  return static_cast<std::byte>(x >> (i % 8 * 8));
}

uint64_t row_name(KvRequestId request, uint32_t layer, uint64_t token, uint32_t head, KvRole role) {
  uint64_t x = request * 0x9E3779B97F4A7C15u + layer * 0xC2B2AE3D27D4EB4Fu +
               token * 0x165667B19E3779F9u + head * 0x27D4EB2F165667C5u +
               static_cast<uint64_t>(role) * 0x85EBCA77C2B2AE63u;
  x = (x ^ (x >> 31)) * 0x94D049BB133111EBu;
  return x ^ (x >> 27);
}

}  // namespace

KvLayout test_layout(uint32_t blocks, uint32_t first_head, uint32_t heads) {
  KvLayout layout = KvLayout::dense(6, blocks, kTestBlockTokens, heads, 200, "test");
  layout.groups[0].total_heads = 8;
  layout.groups[0].first_head = first_head;
  return layout;
}

KvShape test_shape(uint32_t blocks, uint32_t block_tokens, uint32_t first_head, uint32_t heads) {
  return {.layers = 6,
          .blocks = blocks,
          .block_tokens = block_tokens,
          .total_heads = 8,
          .first_head = first_head,
          .heads = heads,
          .head_size = 12};
}

KvLayout hybrid_layout(uint32_t blocks, uint32_t block_tokens, uint32_t window_block_tokens,
                       uint32_t window) {
  KvShape shape = test_shape(blocks, block_tokens);
  shape.layers = 3;
  KvLayout layout = KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, true);
  layout.groups[0].layers = {0, 2, 4};
  shape.block_tokens = window_block_tokens;
  const KvLayout other =
      KvLayout::paged(shape, KvLayout::Order::kHnd, KvLayout::Pair::kInBlock, true);
  KvGroup group = other.groups[0];
  group.layers = {1, 3, 5};
  group.window = window;
  for (KvField& field : group.fields) {
    for (KvPlace& place : field.places) place.buffer += 6;
  }
  layout.groups.push_back(std::move(group));
  layout.fit_buffers();
  return layout;
}

TestCache::TestCache(KvConnector& connector, const KvLayout& layout, std::vector<void*> memory)
    : layout_(layout) {
  if (memory.empty()) {
    absl::StatusOr<void*> base = connector.allocate_cache(layout);
    auto* at = static_cast<std::byte*>(*base);
    for (const KvBuffer& buffer : layout.buffers) {
      memory.push_back(at);
      at += (buffer.bytes + 4095) / 4096 * 4096;
    }
  } else if (!connector.register_cache(layout, memory).ok()) {
    std::abort();
  }
  for (void* buffer : memory) buffers_.push_back(static_cast<std::byte*>(buffer));
  places_.resize(layout.layers());
  for (uint32_t g = 0; g < layout.groups.size(); ++g) {
    for (uint32_t i = 0; i < layout.groups[g].layers.size(); ++i) {
      places_[layout.groups[g].layers[i]] = {g, i};
    }
  }
  for (uint32_t block = 0; block < layout.groups[0].blocks; ++block) {
    free_.push_back(block);
    paint(block);
  }
}

template <typename Visit>
void TestCache::for_each_row(uint32_t block, uint32_t layer, uint64_t index, KvTokens tokens,
                             const Visit& visit) const {
  const auto [group_number, layer_index] = places_[layer];
  const KvGroup& group = layout_.groups[group_number];
  for (const KvField& field : group.fields) {
    const KvPlace& place = field.places[layer_index];
    std::byte* const begin = buffers_[place.buffer] + place.offset + block * field.block_stride;
    for (uint32_t t = 0; t < (field.per_block ? 1 : group.block_tokens); ++t) {
      const uint64_t token = index * group.block_tokens + t;
      if (!field.per_block && (token < tokens.begin || token >= tokens.end)) continue;
      for (uint32_t head = 0; head < group.heads; ++head) {
        visit(begin + t * field.token_stride + head * field.head_stride, field,
              field.per_block ? index : token, group.first_head + head);
      }
    }
  }
}

namespace {

constexpr KvTokens kEveryToken{0, UINT64_MAX};

// Byte `i` of a row whose elements may lie apart.
std::byte& byte_of(std::byte* row, const KvField& field, uint32_t i) {
  const uint32_t size = bytes_of(field.dtype);
  return row[i / size * field.element_stride + i % size];
}

}  // namespace

void TestCache::paint(uint32_t block) {
  for (uint32_t layer = 0; layer < layers(); ++layer) {
    for_each_row(block, layer, 0, kEveryToken,
                 [](std::byte* row, const KvField& field, uint64_t, uint32_t) {
                   for (uint32_t i = 0; i < field.row_bytes(); ++i)
                     byte_of(row, field, i) = kCanary;
                 });
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

void TestCache::fill(uint32_t block, uint32_t layer, KvRequestId request, uint64_t index) {
  for_each_row(block, layer, index, kEveryToken,
               [&](std::byte* row, const KvField& field, uint64_t token, uint32_t head) {
                 const uint64_t name = row_name(request, layer, token, head, field.role);
                 for (uint32_t i = 0; i < field.row_bytes(); ++i) {
                   byte_of(row, field, i) = content(name, i);
                 }
               });
}

bool TestCache::holds(uint32_t block, uint32_t layer, KvRequestId request, uint64_t index,
                      KvTokens tokens) const {
  bool right = true;
  for_each_row(block, layer, index, tokens,
               [&](std::byte* row, const KvField& field, uint64_t token, uint32_t head) {
                 const uint64_t name = row_name(request, layer, token, head, field.role);
                 for (uint32_t i = 0; i < field.row_bytes(); ++i) {
                   right = right && byte_of(row, field, i) == content(name, i);
                 }
               });
  return right;
}

size_t TestCache::damaged() const {
  size_t bytes = 0;
  for (uint32_t block : free_) {
    for (uint32_t layer = 0; layer < layers(); ++layer) {
      for_each_row(block, layer, 0, kEveryToken,
                   [&](std::byte* row, const KvField& field, uint64_t, uint32_t) {
                     for (uint32_t i = 0; i < field.row_bytes(); ++i) {
                       bytes += byte_of(row, field, i) != kCanary;
                     }
                   });
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
  while (!queue_.empty() && start(queue_.front())) queue_.erase(queue_.begin());
  if (!jobs_.empty()) compute(jobs_[random_() % jobs_.size()]);
  std::erase_if(jobs_, [&](Job& job) {
    if (!job.finished || !connector_.is_saved(job.job.job)) return false;
    for (const auto& blocks : job.blocks) cache_.free(blocks);
    return true;
  });
}

bool TestPrefill::start(KvJob taken) {
  const size_t tokens = taken.tokens.size();
  size_t needed = 0;
  for (size_t g = 0; g < cache_.groups(); ++g) needed += cache_.layout().blocks_for(tokens, g);
  if (needed > cache_.free_blocks()) return false;
  Job job;
  for (size_t g = 0; g < cache_.groups(); ++g) {
    job.blocks.push_back(cache_.allocate(cache_.layout().blocks_for(tokens, g), random_));
  }
  job.job = std::move(taken);
  jobs_.push_back(std::move(job));
  return true;
}

absl::Status TestPrefill::bind(const KvBinding& binding, KvRequestId request) {
  absl::StatusOr<uint64_t> number = connector_.bind(binding);
  if (!number.ok()) return number.status();
  KvJob job;
  job.job = *number;
  job.request = request;
  job.tokens.resize(binding.tokens);
  return start(std::move(job)) ? absl::OkStatus() : absl::ResourceExhaustedError("no blocks");
}

void TestPrefill::finish(Job& job, const absl::Status& outcome) {
  const absl::Status status =
      connector_.give_payload(job.job.job, "token of " + std::to_string(job.job.request));
  if (!status.ok()) {
    std::cerr << status << "\n";
    std::abort();
  }
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
  const uint64_t tokens = job.job.tokens.size();
  if (job.chunk_end == job.chunk_begin) {
    uint64_t step = 1;  // whole blocks of every group
    for (const KvGroup& group : cache_.layout().groups) step = std::lcm(step, group.block_tokens);
    job.chunk_end = std::min<uint64_t>(tokens, job.chunk_begin + step * (1 + random_() % 5));
  }
  const bool last = job.chunk_end == tokens;
  if (job.layer >= stop_before_layer_ && last) return;
  const std::vector<uint32_t>& all = job.blocks[cache_.group_of(job.layer)];
  const uint64_t size = cache_.layout().groups[cache_.group_of(job.layer)].block_tokens;
  const uint64_t chunk_begin = job.chunk_begin / size;
  const uint64_t chunk_end = (job.chunk_end - 1) / size + 1;
  for (uint64_t i = chunk_begin; i < chunk_end; ++i) {
    cache_.fill(all[i], job.layer, job.job.request, i);
  }
  // Now and then, blocks that were handed over before.
  const uint64_t begin = random_() % 4 == 0 ? 0 : chunk_begin;
  const uint64_t end = forget_a_block_ && last ? chunk_end - 1 : chunk_end;
  const absl::Status status =
      connector_.save_layer(job.job.job, job.layer, static_cast<uint32_t>(begin),
                            absl::MakeConstSpan(all).subspan(begin, end - begin));
  // Decode may have given the job up a moment ago.
  if (!status.ok() && !absl::IsCancelled(status)) std::abort();
  if (++job.layer < cache_.layers()) return;
  job.layer = 0;
  job.chunk_begin = job.chunk_end;
  if (last) finish(job, absl::OkStatus());
}

// --- decode --------------------------------------------------------------------------------------

absl::Status TestDecode::start(KvRequestId id, const std::string& prefill, uint32_t tokens,
                               uint32_t first_token, Time timeout) {
  return start({.id = id, .prefill = prefill, .first_token = first_token, .timeout = timeout},
               tokens);
}

absl::Status TestDecode::start(KvLoad load, uint32_t tokens) {
  const KvRequestId id = load.id;
  const uint32_t first_token = load.first_token;
  for (uint32_t i = 0; i < tokens; ++i) load.tokens.push_back(static_cast<int32_t>(i));
  TestLoad record;
  for (const KvGroup& group : cache_.layout().groups) {
    TestLoad::Group part;
    const uint64_t window = group.window == 0 ? tokens : group.window;
    part.kept = {std::max<uint64_t>(first_token, tokens > window ? tokens - window : 0), tokens};
    part.first_block = part.kept.begin / group.block_tokens;
    const uint64_t end = (tokens - 1) / group.block_tokens + 1;
    part.blocks = cache_.allocate(end - part.first_block, random_);
    record.blocks.insert(record.blocks.end(), part.blocks.begin(), part.blocks.end());
    record.groups.push_back(std::move(part));
  }
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
        const TestLoad::Group& group = load.groups[cache_.group_of(load.verified)];
        for (size_t i = 0; i < group.blocks.size(); ++i) {
          load.wrong |=
              !cache_.holds(group.blocks[i], load.verified, id, group.first_block + i, group.kept);
        }
      }
      load.status = connector_.load_status(id);
      const bool complete = load.verified == cache_.layers();
      const bool cancel = load.cancel && load.verified >= load.cancel_at;
      if (!complete && load.status.ok() && !cancel) continue;
      if (!complete && load.status.ok()) load.status = absl::CancelledError("by the test");
      load.state = TestLoad::State::kEnding;
    }
    const absl::StatusOr<std::string> payload = connector_.load_payload(id);
    if (payload.ok()) load.payload = *payload;
    if (load.status.ok() && absl::IsUnavailable(payload.status())) continue;
    const std::vector<uint32_t> failed = connector_.failed_blocks(id);
    if (!connector_.end_load(id)) continue;
    for (size_t g = 0; g < load.groups.size(); ++g) {
      const TestLoad::Group& group = load.groups[g];
      for (size_t i = 0; i < group.blocks.size(); ++i) {
        if (std::count(failed.begin(), failed.end(), group.blocks[i]) > 0) continue;
        bool right = true;
        for (uint32_t layer = 0; layer < cache_.layers(); ++layer) {
          if (cache_.group_of(layer) != g) continue;
          right =
              right && cache_.holds(group.blocks[i], layer, id, group.first_block + i, group.kept);
        }
        ++(right ? load.kept : load.wrongly_kept);
      }
    }
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
