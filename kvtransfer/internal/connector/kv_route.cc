// What a load needs of one prefill worker, and how far that is.
#include "kvtransfer/internal/connector/kv_route.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::kvtransfer {
namespace {

std::string heads_text(const KvGroup& group) {
  return absl::StrCat("[", group.first_head, ", ", group.first_head + group.heads, ")");
}

absl::Status check_share(const KvPlan& plan, const KvShare& share) {
  if (plan.complete()) return absl::OkStatus();
  for (const KvPart& part : plan.parts()) {
    const KvGroup& theirs = plan.target().groups[part.target_group];
    const KvHeads all{theirs.first_head, theirs.first_head + theirs.heads};
    if (part.heads == share.heads(theirs.total_heads, all)) continue;
    const std::string which = share.ranks > 1
                                  ? absl::StrCat("as rank ", share.rank, " of ", share.ranks,
                                                 " it should send others of ")
                                  : "";
    return absl::FailedPreconditionError(absl::StrCat(
        "this prefill worker holds KV heads ", heads_text(plan.source().groups[part.source_group]),
        " but ", which, "the decode worker needs ", heads_text(theirs),
        ": ask one that holds them all, or all workers of its group"));
  }
  return absl::FailedPreconditionError(
      "this prefill worker does not hold all layers of the decode worker: ask one that does");
}

}  // namespace

std::vector<KvLayerPlace> layers_of(const KvLayout& layout) {
  std::vector<KvLayerPlace> layers;
  for (uint32_t g = 0; g < layout.groups.size(); ++g) {
    for (uint32_t layer : layout.groups[g].layers) layers.push_back({layer, g});
  }
  std::sort(layers.begin(), layers.end(),
            [](const KvLayerPlace& a, const KvLayerPlace& b) { return a.layer < b.layer; });
  return layers;
}

absl::StatusOr<std::shared_ptr<const KvPlan>> KvAgreement::plan(const KvLayout& source,
                                                                const KvLayout& target,
                                                                const KvShare& share) {
  if (plan_ == nullptr || share_ != share || plan_->source() != source ||
      plan_->target() != target) {
    absl::StatusOr<KvPlan> plan = KvPlan::make(source, target, share);
    if (!plan.ok()) return plan.status();
    plan_ = std::make_shared<const KvPlan>(*std::move(plan));
    share_ = share;
  }
  if (absl::Status status = check_share(*plan_, share); !status.ok()) return status;
  return plan_;
}

void KvRoute::begin(std::shared_ptr<const KvPlan> new_plan, const KvLoadRequest& request) {
  plan = std::move(new_plan);
  const std::vector<KvLayerPlace> ours = layers_of(plan->source());
  const std::vector<KvLayerPlace> theirs = layers_of(request.layout);
  layers.assign(ours.size(), Layer());
  landed_in.assign(request.blocks.size(), 0);
  saved = bytes = landed = 0;
  size_t all = 0;
  for (size_t i = 0, counter = 0; i < ours.size(); ++i) {
    Layer& layer = layers[i];
    layer.pages = all;
    const KvPart* part = plan->find_layer(ours[i].layer, &layer.index);
    if (part == nullptr || part->boxes.empty()) continue;  // decode needs nothing of it
    while (theirs[counter].layer != ours[i].layer) ++counter;
    layer.counter = static_cast<uint32_t>(counter);
    layer.part = static_cast<size_t>(part - plan->parts().data());
    layer.tokens = kept_tokens(request.layout.groups[part->target_group], request.first_token,
                               request.tokens.size());
    layer.blocks = blocks_of(plan->source().groups[part->source_group], layer.tokens);
    all += layer.blocks.count;
    bytes += (layer.tokens.end - layer.tokens.begin) * part->bytes_per_token();
  }
  pages.assign(all, kNotSaved);
}

// Blocks before the first are at decode already; those saved before are known.
void KvRoute::save(uint32_t layer, uint64_t first_block, absl::Span<const uint32_t> blocks,
                   absl::FunctionRef<void(KvBlockRange)> on_run) {
  const Layer& place = layers[layer];
  const KvBlockRange wanted = place.blocks;
  KvBlockRange run;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const uint64_t at = first_block + i;
    const bool fresh = at >= wanted.first && at - wanted.first < wanted.count &&
                       blocks[i] != kNotSaved &&
                       pages[place.pages + (at - wanted.first)] == kNotSaved;
    if (fresh) {
      pages[place.pages + (at - wanted.first)] = blocks[i];
      ++saved;
      if (run.count++ == 0) run.first = at;
    }
    const bool last = i + 1 == blocks.size();
    if (run.count == 0 || (fresh && !last)) continue;
    on_run(run);
    run = {};
  }
}

absl::Status KvRoute::for_each_move(uint32_t layer_number, KvBlockRange blocks,
                                    const KvLoadRequest& request,
                                    absl::FunctionRef<absl::Status(const KvMove&)> sink) const {
  const Layer& layer = layers[layer_number];
  const KvPart& part = plan->parts()[layer.part];
  const uint64_t size = plan->source().groups[part.source_group].block_tokens;
  const KvTokens tokens{std::max(blocks.first * size, layer.tokens.begin),
                        std::min((blocks.first + blocks.count) * size, layer.tokens.end)};
  const KvPages from{layer.blocks.first,
                     absl::MakeConstSpan(pages).subspan(layer.pages, layer.blocks.count)};
  return plan->for_each_move(layer.part, tokens, from, request.pages(part.target_group),
                             {layer.index, layer.index + 1}, sink);
}

void KvRoute::count(uint32_t layer, const KvMove& move, const KvLoadRequest& request) {
  landed += move.counted_bytes;
  const KvPart& part = plan->parts()[layers[layer].part];
  const KvPages theirs = request.pages(part.target_group);
  const size_t base = static_cast<size_t>(theirs.pages.data() - request.blocks.data());
  const uint64_t size = request.layout.groups[part.target_group].block_tokens;
  const KvTokens tokens = move.tokens;
  const uint64_t per_token = move.counted_bytes / (tokens.end - tokens.begin);
  for (uint64_t at = tokens.begin; at < tokens.end;) {
    const uint64_t end = std::min((at / size + 1) * size, tokens.end);
    landed_in[base + (at / size - theirs.first_block)] += (end - at) * per_token;
    at = end;
  }
}

std::string KvRoute::arrived(const KvLoadRequest& request) const {
  std::string bits((request.blocks.size() + 7) / 8, '\0');
  for (const KvPart& part : plan->parts()) {
    const KvGroup& group = request.layout.groups[part.target_group];
    const KvPages theirs = request.pages(part.target_group);
    const size_t base = static_cast<size_t>(theirs.pages.data() - request.blocks.data());
    const KvTokens kept = kept_tokens(group, request.first_token, request.tokens.size());
    uint64_t per_token = 0;
    for (const KvPart& other : plan->parts()) {
      if (other.target_group != part.target_group) continue;
      per_token += other.bytes_per_token() * other.layers.size();
    }
    for (size_t i = 0; i < theirs.pages.size(); ++i) {
      const uint64_t begin = (theirs.first_block + i) * group.block_tokens;
      const uint64_t tokens =
          std::min(begin + group.block_tokens, kept.end) - std::max(begin, kept.begin);
      if (landed_in[base + i] != tokens * per_token) continue;
      bits[(base + i) / 8] = static_cast<char>(bits[(base + i) / 8] | 1 << (base + i) % 8);
    }
  }
  return bits;
}

}  // namespace baton::kvtransfer
