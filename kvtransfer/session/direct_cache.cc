// A cache as layers, and the plans between two of them.
#include "kvtransfer/session/direct_cache.h"

#include <zlib.h>

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kvtransfer/kv_packing.h"

namespace baton::kvtransfer::session::direct {
namespace {

std::string heads_text(const KvLayout& layout) {
  const KvGroup& group = layout.groups[0];
  return absl::StrCat("[", group.first_head, ", ", group.first_head + group.heads, ")");
}

absl::StatusOr<Passage> passage(Agent& agent, Op op, const Layer& here, const std::string& other,
                                const Layer& there, const KvShare& share, bool checks) {
  Passage out;
  const bool write = op == Op::kWrite;
  auto plan = AgentKvPlan::make(agent, op, here.placement, other, there.placement, share);
  if (!plan.ok()) return plan.status();
  if (absl::Status good = check_complete(plan->plan(), share); !good.ok()) return good;
  out.plan = *std::move(plan);
  if (!checks) return out;
  const KvLayout& source = (write ? here : there).placement.layout;
  const KvLayout& target = (write ? there : here).placement.layout;
  auto sums = KvChecksums::make(source, target, share);
  if (!sums.ok()) return sums.status();
  out.sums = *std::move(sums);
  return out;
}

}  // namespace

uint64_t number_in(const json& value) {
  if (value.is_number_integer() && value >= 0) return value.get<uint64_t>();
  return value.get_ref<const json::number_unsigned_t&>();  // throws
}

uint32_t Layer::crc(uint32_t block) const {
  const uint64_t address = row.address + block * row.stride;
  return static_cast<uint32_t>(
      crc32_z(0, reinterpret_cast<const unsigned char*>(address), row.bytes));
}

const json& packing_in(const json& message, size_t layer) {
  return message.at("kinds").at(message.at("layers").at(layer).get<size_t>());
}

bool checks_in(const json& message) { return message.value("checks", json()) != false; }

absl::StatusOr<Layer> layer_of(const json& row, const json& packing, const json& identity,
                               MemoryKind kind) {
  Layer out;
  out.row = {number_in(row.at(0)), number_in(row.at(1)), number_in(row.at(2)), number_in(row.at(3)),
             number_in(row.at(4))};
  const std::optional<Descriptor> span = out.row.span();
  if (!span.has_value() || out.row.count > UINT32_MAX) {
    return absl::InvalidArgumentError("a row of a cache covers nothing, or too much");
  }
  KvGroup group;
  group.layers = {0};
  group.blocks = static_cast<uint32_t>(out.row.count);
  absl::StatusOr<KvPlacement> placed =
      place_packed(packing.dump(), group, absl::MakeConstSpan(&*span, 1), out.row.stride, kind);
  if (!placed.ok()) return placed.status();
  out.placement = *std::move(placed);
  out.placement.layout.model.weights = identity.get<std::string>();
  return out;
}

std::vector<Layer> layers_of(const KvPlacement& whole) {
  std::vector<Layer> layers;
  for (size_t g = 0; g < whole.layout.groups.size(); ++g) {
    const KvGroup& group = whole.layout.groups[g];
    for (size_t i = 0; i < group.layers.size(); ++i) {
      Layer& layer = layers.emplace_back();
      layer.number = group.layers[i];
      layer.group = g;
      KvLayout& one = layer.placement.layout;
      one.format = whole.layout.format;
      one.model = whole.layout.model;
      one.groups.push_back(group);
      one.groups[0].layers = {0};
      std::vector<uint32_t> used;
      for (KvField& field : one.groups[0].fields) {
        KvPlace place = field.places[i];
        const auto known = std::find(used.begin(), used.end(), place.buffer);
        const auto at = static_cast<uint32_t>(known - used.begin());
        if (known == used.end()) {
          used.push_back(place.buffer);
          one.buffers.push_back(whole.layout.buffers[place.buffer]);
          layer.placement.addresses.push_back(whole.addresses[place.buffer]);
        }
        place.buffer = at;
        field.places = {place};
      }
    }
  }
  std::sort(layers.begin(), layers.end(),
            [](const Layer& a, const Layer& b) { return a.number < b.number; });
  return layers;
}

absl::StatusOr<std::vector<Layer>> layers_in(const json& message, const json& packings) {
  if (message.contains("placement")) {
    const auto whole =
        KvPlacement::decode(absl::HexStringToBytes(message["placement"].get<std::string>()));
    if (!whole.ok()) return whole.status();
    return layers_of(*whole);
  }
  std::vector<Layer> layers;
  const bool device = message.value("device", json()) == true;
  for (const json& row : message.at("rows")) {
    auto layer = layer_of(row, packing_in(packings, layers.size()), message.at("identity"),
                          device ? MemoryKind::kVram : MemoryKind::kDram);
    if (!layer.ok()) return layer.status();
    layer->number = static_cast<uint32_t>(layers.size());
    layers.push_back(*std::move(layer));
  }
  return layers;
}

uint32_t rank_of(absl::string_view agent, uint32_t ranks) {
  uint32_t number = 0;
  const bool said = absl::SimpleAtoi(agent.substr(agent.rfind('/') + 1), &number);
  return said && ranks > 0 ? number % ranks : 0;
}

uint32_t ranks_in(const json& message) { return message.value("ranks", json(1)).get<uint32_t>(); }

absl::Status check_complete(const KvPlan& plan, const KvShare& share) {
  if (plan.complete()) return absl::OkStatus();
  const std::string which = share.ranks > 1 ? absl::StrCat("as rank ", share.rank, " of ",
                                                           share.ranks, " it should send others; ")
                                            : "";
  return absl::FailedPreconditionError(
      absl::StrCat("this prefill worker holds KV heads ", heads_text(plan.source()), " but ", which,
                   "the decode worker needs ", heads_text(plan.target()),
                   ": ask one that holds them all, or all workers of its group"));
}

bool moves(const Passage& one) {
  const KvPlan& plan = one.plan->plan();
  return !plan.parts().empty() && !plan.parts()[0].boxes.empty();
}

Routes routes_of(Cache& ours, Op op, const std::string& agent, const std::vector<Layer>& theirs,
                 const KvShare& share, bool checks) {
  Routes out;
  out.layer_of.assign(theirs.size(), UINT32_MAX);
  size_t found = 0;
  for (uint32_t here = 0; here < ours.layers.size(); ++here) {
    Passage& one = out.passages.emplace_back();
    const auto there = std::find_if(theirs.begin(), theirs.end(), [&](const Layer& each) {
      return each.number == ours.layers[here].number;
    });
    if (there == theirs.end()) continue;
    ++found;
    out.layer_of[static_cast<size_t>(there - theirs.begin())] = here;
    auto made = passage(ours.agent, op, ours.layers[here], agent, *there, share, checks);
    out.why = made.status();
    if (!made.ok()) return out;
    one = *std::move(made);
  }
  if (found < (op == Op::kRead ? ours.layers.size() : theirs.size())) {
    out.why = absl::FailedPreconditionError(
        "this prefill worker does not hold all layers of the decode worker: ask one that does");
  }
  return out;
}

}  // namespace baton::kvtransfer::session::direct
