// Hierarchical: a ring inside each node, halving and doubling (or a binomial tree) between nodes,
// and a ring inside each node. Nodes exchange nothing twice, and all ranks of a node share in it.
#include "collectives/schedules/nodes.h"

namespace baton::collectives::schedules {
namespace {

void all_reduce(const Nodes& nodes, Writer& w) {
  const uint32_t unit = power_of_two_up_to(nodes.count);  // parts in a block
  const auto range = [&nodes, unit](uint32_t i, uint32_t j) {
    const uint32_t block = nodes.block_of(i, j);
    return Range{block * unit, std::min(block + 1, nodes.size) * unit};
  };
  ring_reduce_scatter(
      w, nodes.inside, nodes.blocks, range, [](uint32_t, uint32_t part) { return output(part); },
      nodes.count == 1);
  if (nodes.count > 1) {
    nodes.for_own_blocks([&nodes, unit, &w](uint32_t block) {
      halving_doubling_all_reduce(w, nodes.rail(block), block * unit,
                                  nodes.members > 1 ? kOutputArea : kInputArea);
    });
  }
  ring_all_gather(w, nodes.inside, nodes.blocks, range, output);
}

// Column j of node k: the part of local rank block_of(i, j) there, one part or none.
Range column(const Nodes& nodes, uint32_t i, uint32_t j_and_k) {
  const uint32_t k = j_and_k % nodes.count, block = nodes.block_of(i, j_and_k / nodes.count);
  const uint32_t part = k * nodes.size + block;
  return {part, block < nodes.members_of(k) ? part + 1 : part};
}

// Sums over our node stand side by side for each rail, behind the partial sums of the ring.
void reduce_scatter(const Nodes& nodes, uint32_t rank, Writer& w) {
  const uint32_t n = nodes.ranks, count = nodes.count;
  const auto rail_area = [&nodes, n, count](uint32_t block) {
    return Area{BufferName::kScratch, n + block / nodes.members * count};
  };
  const auto partial = [&](uint32_t step, uint32_t part) {
    if (step + 2 < nodes.members) return scratch(part);
    return count == 1 ? output(part) : rail_area(part % nodes.size)(part / nodes.size);
  };
  w.need_scratch(n + (count > 1 ? nodes.blocks * count : 0));
  ring_reduce_scatter(
      w, nodes.inside, nodes.blocks * count,
      [&nodes](uint32_t i, uint32_t k) { return column(nodes, i, k); }, partial, count == 1);
  if (count == 1) return;
  nodes.for_own_blocks([&](uint32_t block) {
    const Area area = rail_area(block);
    const uint32_t on_rail = nodes.on_rail(block);
    if (nodes.members == 1 && nodes.size > 1) {  // no ring has filled it
      for (uint32_t k = 0; k < on_rail; ++k) w.copy(area(k), input(k * nodes.size + block));
    }
    halving_reduce_scatter(w, nodes.rail(block), on_rail, nodes.size == 1 ? kInputArea : area, area,
                           output(rank));
  });
}

void all_gather(const Nodes& nodes, uint32_t rank, Writer& w) {
  w.copy(output(rank), input(rank));
  if (nodes.count > 1) {
    if (nodes.size > 1) w.need_scratch(nodes.blocks * nodes.count);
    nodes.for_own_blocks([&nodes, rank, &w](uint32_t block) {
      if (nodes.size == 1) {
        doubling_all_gather(w, nodes.rail(block), nodes.count, kOutputArea);
        return;
      }
      const Area area{BufferName::kScratch, block / nodes.members * nodes.count};
      const uint32_t on_rail = nodes.on_rail(block);
      if (block == nodes.local) w.copy(area(nodes.node), input(rank));
      doubling_all_gather(w, nodes.rail(block), on_rail, area);
      for (uint32_t k = 0; k < on_rail; ++k) {
        const uint32_t part = k * nodes.size + block;
        if (part != rank) w.copy(output(part), area(k));
      }
    });
  }
  ring_all_gather(
      w, nodes.inside, nodes.blocks * nodes.count,
      [&nodes](uint32_t i, uint32_t k) { return column(nodes, i, k); }, output);
}

// The binomial tree of a rail, over nodes.
Branch rail_branch(const Nodes& nodes, uint32_t root_node) {
  return binomial_branch(nodes.count, root_node, nodes.node);
}

Range one_block(const Nodes& nodes, uint32_t i, uint32_t j) {
  const uint32_t block = nodes.block_of(i, j);
  return {block, std::min(block + 1, nodes.size)};
}

// The root deals out the blocks inside its node; each goes along its rail; nodes gather.
void broadcast(const Nodes& nodes, uint32_t root, uint32_t rank, Writer& w) {
  const uint32_t root_node = root / nodes.size;
  const Area own = rank == root ? kInputArea : kOutputArea;
  if (rank == root) {
    nodes.for_blocks_of_others([&](uint32_t block, uint32_t to) { w.send(to, input(block)); });
  }
  const Branch branch = rail_branch(nodes, root_node);
  nodes.for_own_blocks([&](uint32_t block) {
    const Group rail = nodes.rail(block);
    if (rank != root) w.receive(branch.root ? root : rail.rank(branch.parent), output(block));
    for (auto child = branch.children.rbegin(); child != branch.children.rend(); ++child) {
      w.send(rail.rank(child->rank), own(block));
    }
    w.copy(output(block), own(block));
  });
  ring_all_gather(
      w, nodes.inside, nodes.blocks,
      [&nodes](uint32_t i, uint32_t j) { return one_block(nodes, i, j); }, own);
}

// The same backwards.
void reduce(const Nodes& nodes, uint32_t root, uint32_t rank, Writer& w) {
  const uint32_t root_node = root / nodes.size;
  const auto sum = [&](uint32_t, uint32_t part) {
    const bool last = rank == root && nodes.count == 1 && part % nodes.members == nodes.local;
    return last ? output(part) : scratch(part);
  };
  w.need_scratch(nodes.size);
  ring_reduce_scatter(
      w, nodes.inside, nodes.blocks,
      [&nodes](uint32_t i, uint32_t j) { return one_block(nodes, i, j); }, sum, nodes.count == 1);
  const Branch branch = rail_branch(nodes, root_node);
  nodes.for_own_blocks([&](uint32_t block) {
    const Group rail = nodes.rail(block);
    const Place target = rank == root ? output(block) : scratch(block);
    Place own = nodes.members > 1 ? scratch(block) : input(block);
    for (const Branch::Child& child : branch.children) {
      w.receive_reduce(rail.rank(child.rank), target, own, 1,
                       branch.root && &child == &branch.children.back());
      own = target;
    }
    if (rank != root) w.send(branch.root ? root : rail.rank(branch.parent), own);
  });
  if (rank != root) return;
  nodes.for_blocks_of_others(
      [&](uint32_t block, uint32_t from) { w.receive(from, output(block)); });
}

}  // namespace

Shape hierarchical_shape(const ScheduleSpec& spec) {
  const uint32_t size = std::min(spec.node_size, spec.ranks);
  const uint32_t count = (spec.ranks + size - 1) / size;
  const uint32_t unit = power_of_two_up_to(count);
  switch (spec.collective) {
    case Collective::kAllReduce:
      return {size * unit, size > 1 || unit < count ? unit : unit / 2};
    case Collective::kReduceScatter:
      return {spec.ranks, count > 1 ? halving_message(count) : 1};
    case Collective::kAllGather:
      return {spec.ranks, count > 1 ? doubling_message(count) : 1};
    default:
      return {size, 1};
  }
}

void write_hierarchical(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w) {
  const Nodes nodes(spec, rank, channel);
  switch (spec.collective) {
    case Collective::kAllReduce:
      all_reduce(nodes, w);
      break;
    case Collective::kReduceScatter:
      reduce_scatter(nodes, rank, w);
      break;
    case Collective::kAllGather:
      all_gather(nodes, rank, w);
      break;
    case Collective::kBroadcast:
      broadcast(nodes, spec.root, rank, w);
      break;
    case Collective::kReduce:
      reduce(nodes, spec.root, rank, w);
      break;
    default:
      break;
  }
}

}  // namespace baton::collectives::schedules
