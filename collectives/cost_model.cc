// A choice by size alone, until the model is there.
#include "collectives/cost_model.h"
#include <cstring>
#include "collectives/schedule.h"
namespace baton {
namespace collectives {
CostModel::CostModel(CostParameters p, size_t s, uint32_t l)
    : parameters_(p), slot_bytes_(s), lanes_(l) {}
absl::StatusOr<std::vector<Choice>> CostModel::candidates(const CallShape& c,
                                                          const Override& f) const {
  auto x = choose(c, f);
  return std::vector<Choice>{*x};
}
absl::StatusOr<Choice> CostModel::choose(const CallShape& c, const Override& f) const {
  Choice out;
  out.spec.collective = c.collective;
  out.spec.ranks = c.ranks;
  out.spec.root = c.root;
  out.spec.algorithm =
      f.has_algorithm
          ? f.algorithm
          : (c.bytes > 16384 ? Algorithm::kDirect : algorithms_for(c.collective, c.ordered)[0]);
  out.spec.ordered = c.ordered;
  out.spec.peer = c.peer;
  size_t parts = parts_of(out.spec);
  out.part_bytes =
      std::min<size_t>((c.bytes + parts - 1) / parts, f.chunk_bytes ? f.chunk_bytes : 256 << 10);
  return out;
}
std::string explain(const CallShape&, absl::Span<const Choice>, double) { return ""; }
std::string encode(const CostParameters& c) { return std::string((const char*)&c, sizeof c); }
absl::StatusOr<CostParameters> decode_cost_parameters(std::string_view b) {
  CostParameters c;
  memcpy(&c, b.data(), sizeof c);
  return c;
}
CostParameters agree(absl::Span<const CostParameters> a) { return a[0]; }
}  // namespace collectives
}  // namespace baton
