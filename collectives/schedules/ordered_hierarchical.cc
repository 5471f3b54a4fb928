// Hierarchical reductions in rank order: nodes collect their own contributions to each block, and
// hand them along the block's rail in one message to where the block is folded.
#include "collectives/schedules/nodes.h"

namespace baton::collectives::schedules {
namespace {

// The contributions of our node to one part each go from every member to the part's owner here.
// `part_of(block)` is that part of `block`, or none; an owner leaves them at place_of(block), by
// local rank. No rank is more than one message ahead: each block round is an exchange.
template <typename PartOf, typename PlaceOf>
void collect_inside(Writer& w, const Nodes& nodes, PartOf part_of, PlaceOf place_of) {
  const uint32_t m = nodes.members, first = nodes.node * nodes.size;
  for (uint32_t j = 0; j < nodes.blocks; ++j) {
    const uint32_t own = nodes.local + j * m;
    const std::optional<uint32_t> mine = own < nodes.size ? part_of(own) : std::nullopt;
    for (uint32_t t = 1; t < m; ++t) {
      const uint32_t to = (nodes.local + t) % m, block = to + j * m;
      const std::optional<uint32_t> theirs = block < nodes.size ? part_of(block) : std::nullopt;
      if (theirs) w.send(first + to, input(*theirs));
    }
    if (!mine) continue;
    const uint32_t base = place_of(own);
    w.copy(scratch(base + nodes.local), input(*mine));
    for (uint32_t t = 1; t < m; ++t) {
      const uint32_t from = (nodes.local + m - t) % m;
      w.receive(first + from, scratch(base + from));
    }
  }
}

// Scratch: the contributions of all ranks to our part, by rank; then, for every block that is ours
// and every other node, the contributions of our node to the part of that node's owner.
void ordered_reduce_scatter(const Nodes& nodes, uint32_t rank, Writer& w) {
  const uint32_t n = nodes.ranks, m = nodes.members;
  const auto place = [&](uint32_t block, uint32_t k) {
    if (k == nodes.node) return k * nodes.size;
    return n + (block / m * nodes.count + k) * m;
  };
  w.need_scratch(n + (nodes.count > 1 ? nodes.blocks * nodes.count * m : 0));
  for (uint32_t k = 0; k < nodes.count; ++k) {
    collect_inside(
        w, nodes,
        [&](uint32_t block) -> std::optional<uint32_t> {
          if (block >= nodes.members_of(k)) return std::nullopt;
          return k * nodes.size + block;
        },
        [&](uint32_t block) { return place(block, k); });
  }
  nodes.for_own_blocks([&](uint32_t block) {
    for (uint32_t t = 1; t < nodes.count; ++t) {
      const uint32_t k = (nodes.node + t) % nodes.count;
      if (block < nodes.members_of(k)) w.send(nodes.owner(block, k), scratch(place(block, k)), m);
    }
  });
  for (uint32_t t = 1; t < nodes.count; ++t) {
    const uint32_t k = (nodes.node + nodes.count - t) % nodes.count;
    w.receive(nodes.owner(nodes.local, k), scratch(k * nodes.size), nodes.members_of(k));
  }
  w.fold(output(rank), 0);
}

// Blocks are folded by their owners on the root's node. Scratch: results by block; then, for every
// block that is ours, contributions by rank.
void ordered_reduce(const Nodes& nodes, uint32_t root, uint32_t rank, Writer& w) {
  const uint32_t root_node = root / nodes.size;
  const auto place = [&](uint32_t block, uint32_t k) {
    return nodes.size + block / nodes.members * nodes.ranks + k * nodes.size;
  };
  w.need_scratch(nodes.size + nodes.blocks * nodes.ranks);
  collect_inside(
      w, nodes, [](uint32_t block) { return std::optional<uint32_t>(block); },
      [&](uint32_t block) { return place(block, nodes.node); });
  if (nodes.node != root_node) {
    nodes.for_own_blocks([&](uint32_t block) {
      w.send(nodes.owner(block, root_node), scratch(place(block, nodes.node)), nodes.members);
    });
    return;
  }
  nodes.for_own_blocks([&](uint32_t block) {
    for (uint32_t k = 0; k < nodes.count; ++k) {
      if (k == root_node) continue;
      w.receive(nodes.owner(block, k), scratch(place(block, k)), nodes.members_of(k));
    }
    const Place result = rank == root ? output(block) : scratch(block);
    w.fold(result, place(block, 0));
    if (rank != root) w.send(root, result);
  });
  if (rank != root) return;
  nodes.for_blocks_of_others(
      [&](uint32_t block, uint32_t from) { w.receive(from, output(block)); });
}

}  // namespace

Shape ordered_hierarchical_shape(const ScheduleSpec& spec) {
  const uint32_t size = std::min(spec.node_size, spec.ranks);
  return {spec.collective == Collective::kReduce ? size : spec.ranks, size < spec.ranks ? size : 1};
}

void write_ordered_hierarchical(const ScheduleSpec& spec, uint32_t rank, Writer& w) {
  const Nodes nodes(spec, rank, 0);
  if (spec.collective == Collective::kReduce) {
    ordered_reduce(nodes, spec.root, rank, w);
  } else {
    ordered_reduce_scatter(nodes, rank, w);
  }
}

}  // namespace baton::collectives::schedules
