// Derives the page lists and layouts of a workload.
#include "bench/kv/workload.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "transport/base/nearest_name.h"

namespace baton::bench {

absl::Span<const KvModel> kv_models() {
  static constexpr std::array kModels = {
      KvModel{"kjv", 4, 3, 32},
      KvModel{"qwen3-0.6b", 28, 8, 128},
      KvModel{"qwen3-8b", 36, 8, 128},
      KvModel{"qwen3-32b", 64, 8, 128},
      KvModel{"qwen3-235b", 94, 4, 128},
      KvModel{"mistral-7b", 32, 8, 128},
      KvModel{"llama3-8b", 32, 8, 128},
      KvModel{"llama3-70b", 80, 8, 128},
      KvModel{"llama3-405b", 126, 8, 128},
      KvModel{"gpt-oss-20b", 24, 8, 64},
      KvModel{"gpt-oss-120b", 36, 8, 64},
  };
  return kModels;
}

absl::StatusOr<KvModel> find_kv_model(std::string_view name) {
  std::vector<std::string> known;
  for (const KvModel& model : kv_models()) {
    if (name == model.name) return model;
    known.emplace_back(model.name);
  }
  return absl::InvalidArgumentError(absl::StrFormat("there is no model \"%s\"%s (known: %s)", name,
                                                    base::did_you_mean(name, known),
                                                    absl::StrJoin(known, ", ")));
}

namespace {

constexpr const char* kFormat = "bf16 K[d][t] V[t][d]";

// `count` of the pages [0, total), in an order that depends on the seed alone, on every machine.
std::vector<uint32_t> scatter(size_t count, size_t total, uint64_t seed) {
  std::vector<uint32_t> pages(total);
  std::iota(pages.begin(), pages.end(), 0u);
  for (size_t i = 0; i < count; ++i) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    std::swap(pages[i], pages[i + (seed >> 33) % (total - i)]);
  }
  pages.resize(count);
  return pages;
}

std::vector<uint32_t> in_order(size_t count) {
  std::vector<uint32_t> pages(count);
  std::iota(pages.begin(), pages.end(), 0u);
  return pages;
}

// Heads [0, kv_heads / tp) of the model, as the first worker of its group holds them.
kvtransfer::KvLayout shard(const KvModel& model, uint32_t tp, uint32_t blocks,
                           uint32_t block_tokens) {
  kvtransfer::KvLayout layout =
      kvtransfer::KvLayout::dense(model.layers, blocks, block_tokens, model.kv_heads / tp,
                                  model.head_token_bytes() * block_tokens, kFormat);
  layout.groups[0].total_heads = model.kv_heads;
  return layout;
}

size_t count_pieces(const Layout& source, const Layout& target) {
  TransferCursor cursor(source, target, 0, source.bytes());
  size_t pieces = 0;
  for (Piece piece; cursor.next(piece);) ++pieces;
  return pieces;
}

absl::Status out_of_range(const char* what, uint64_t least, uint64_t most) {
  return absl::InvalidArgumentError(absl::StrFormat("%s must be from %u to %u", what, least, most));
}

}  // namespace

Json WorkloadSpec::to_json() const {
  if (model.empty()) {
    return {{"pages", pages},
            {"page_bytes", page_bytes},
            {"layout", scattered ? "scattered" : "contiguous"}};
  }
  return {{"model", model},
          {"tokens", tokens},
          {"block_tokens", block_tokens},
          {"tp", absl::StrCat(tp_source, ":", tp_target)},
          {"layout", scattered ? "scattered" : "contiguous"}};
}

absl::StatusOr<WorkloadSpec> WorkloadSpec::from_json(const Json& json) {
  WorkloadSpec spec;
  const auto number = [&](const char* key, auto& out) {
    const auto it = json.find(key);
    if (it == json.end() || !it->is_number_unsigned()) return false;
    const auto value = it->get<uint64_t>();
    out = static_cast<std::decay_t<decltype(out)>>(value);
    return out == value;
  };
  const auto text = [&](const char* key, std::string& out) {
    const auto it = json.find(key);
    if (it == json.end() || !it->is_string()) return false;
    out = it->get<std::string>();
    return true;
  };
  const absl::Status bad = absl::InvalidArgumentError("not a workload description");
  std::string layout, tp;
  if (!json.is_object() || !text("layout", layout)) return bad;
  spec.scattered = layout == "scattered";
  if (!json.contains("model")) {
    return number("pages", spec.pages) && number("page_bytes", spec.page_bytes)
               ? absl::StatusOr<WorkloadSpec>(spec)
               : bad;
  }
  const bool good = text("model", spec.model) && number("tokens", spec.tokens) &&
                    number("block_tokens", spec.block_tokens) && text("tp", tp) &&
                    std::sscanf(tp.c_str(), "%9u:%9u", &spec.tp_source, &spec.tp_target) == 2;
  return good ? absl::StatusOr<WorkloadSpec>(spec) : bad;
}

absl::Status Workload::make_pages(const WorkloadSpec& spec) {
  if (spec.pages < 1 || spec.pages > UINT32_MAX / 2) {
    return out_of_range("the number of pages", 1, UINT32_MAX / 2);
  }
  if (spec.page_bytes < 1 || spec.page_bytes > WorkloadSpec::kMaxBytes / spec.pages) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%u pages of %u bytes: give pages of at least one byte, and at most 1 TiB "
                        "altogether",
                        spec.pages, spec.page_bytes));
  }
  const size_t bytes = spec.pages * spec.page_bytes;
  if (!spec.scattered) {
    source_ = target_ = Layout::contiguous(0, bytes);
    source_bytes_ = target_bytes_ = bytes;
    return absl::OkStatus();
  }
  source_pages_ = scatter(spec.pages, 2 * spec.pages, 1);
  target_pages_ = scatter(spec.pages, 2 * spec.pages, 2);
  source_ = Layout::paged(0, source_pages_, spec.page_bytes, spec.page_bytes);
  target_ = Layout::paged(0, target_pages_, spec.page_bytes, spec.page_bytes);
  source_bytes_ = target_bytes_ = 2 * bytes;
  pieces_ = spec.pages;
  return absl::OkStatus();
}

absl::Status Workload::make_model(const WorkloadSpec& spec) {
  const absl::StatusOr<KvModel> model = find_kv_model(spec.model);
  if (!model.ok()) return model.status();
  if (spec.block_tokens < 1 || spec.block_tokens > 1024) {
    return out_of_range("the number of tokens in a block", 1, 1024);
  }
  const size_t most = WorkloadSpec::kMaxBytes / 4 / model->token_bytes();
  if (spec.tokens < 1 || spec.tokens > most) return out_of_range("the number of tokens", 1, most);
  for (const uint32_t tp : {spec.tp_source, spec.tp_target}) {
    if (tp < 1 || model->kv_heads % tp != 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s has %u KV heads, which cannot be split over %u workers: give --tp "
                          "two divisors of %u, for example --tp %u:1",
                          model->name, model->kv_heads, tp, model->kv_heads, model->kv_heads));
    }
  }
  const auto blocks = static_cast<uint32_t>((spec.tokens - 1) / spec.block_tokens + 1);
  const uint32_t cache = spec.scattered ? 2 * blocks : blocks;
  source_pages_ = spec.scattered ? scatter(blocks, cache, 1) : in_order(blocks);
  target_pages_ = spec.scattered ? scatter(blocks, cache, 2) : in_order(blocks);
  const auto plan =
      kvtransfer::KvPlan::make(shard(*model, spec.tp_source, cache, spec.block_tokens),
                               shard(*model, spec.tp_target, cache, spec.block_tokens));
  if (!plan.ok()) return plan.status();
  const absl::Status moved = plan->for_each_move(
      0, {0, uint64_t{blocks} * spec.block_tokens}, {0, source_pages_}, {0, target_pages_},
      kvtransfer::KvPlan::kAllLayers, [&](const kvtransfer::KvMove& move) {
        source_ = move.source;  // one, for all layers
        target_ = move.target;
        return absl::OkStatus();
      });
  if (!moved.ok()) return moved;
  source_bytes_ = plan->source().bytes();
  target_bytes_ = plan->target().bytes();
  pieces_ = count_pieces(source_, target_);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Workload>> Workload::make(const WorkloadSpec& spec) {
  std::unique_ptr<Workload> workload(new Workload);
  const absl::Status status =
      spec.model.empty() ? workload->make_pages(spec) : workload->make_model(spec);
  if (!status.ok()) return status;
  return workload;
}

}  // namespace baton::bench
