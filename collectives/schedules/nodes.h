// Ranks by the nodes that they are on, as hierarchical schedules see them.
//
// A node with m ranks out of at most g keeps g blocks; local rank l owns the blocks l, l + m, ...
// (just l if the node is full). The owners of a block, one per node, are its rail.
#pragma once

#include "collectives/schedules/writers.h"

namespace baton::collectives::schedules {

struct Nodes {
  Nodes(const ScheduleSpec& spec, uint32_t rank, uint32_t channel)
      : ranks(spec.ranks),
        size(std::min(spec.node_size, spec.ranks)),
        count((spec.ranks + size - 1) / size),
        node(rank / size),
        local(rank % size),
        members(members_of(node)),
        blocks((size + members - 1) / members) {
    const uint32_t stride = channel % 2 == 0 ? 1 : members - 1;
    inside = {channel % 2 == 0 ? local : (members - local) % members,
              members,
              node * size,
              stride,
              members,
              {}};
  }

  uint32_t members_of(uint32_t k) const { return std::min(size, ranks - k * size); }
  uint32_t owner(uint32_t block, uint32_t k) const { return k * size + block % members_of(k); }
  // Ranks that own this block, by node.
  Group rail(uint32_t block) const {
    return {node, count, block, size, ranks, owner(block, count - 1)};
  }
  // How many nodes have a rank with this local number.
  uint32_t on_rail(uint32_t block) const {
    return block < members_of(count - 1) ? count : count - 1;
  }
  // The j-th block of member i of the ring inside this node, if there is one; else `size`.
  uint32_t block_of(uint32_t i, uint32_t j) const {
    return std::min(size, inside.rank(i) - inside.first + j * members);
  }
  template <typename F>
  void for_own_blocks(F f) const {
    for (uint32_t block = local; block < size; block += members) f(block);
  }
  // The blocks that others on our node own: f(block, owner).
  template <typename F>
  void for_blocks_of_others(F f) const {
    for (uint32_t block = 0; block < size; ++block) {
      if (block % members != local) f(block, owner(block, node));
    }
  }

  uint32_t ranks, size, count;  // of ranks; of a full node; of nodes
  uint32_t node, local;         // ours
  uint32_t members, blocks;     // of our node; the most that one of us owns
  Group inside;                 // the ring of our node
};

}  // namespace baton::collectives::schedules
