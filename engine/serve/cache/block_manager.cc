// Block reference counts, the intrusive free lists and the prefix cache.
#include "engine/serve/cache/block_manager.h"

#include <openssl/sha.h>

#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

namespace baton::engine::serve {

BlockManager::BlockManager(uint32_t num_blocks) : blocks_(num_blocks) {
  cached_.reserve(num_blocks);
  for (uint32_t block = 0; block < num_blocks; ++block) push_free(block, false);
}

void BlockManager::push_free(uint32_t index, bool reuse_first) {
  Block& block = blocks_[index];
  FreeList& list = list_of(block);
  block.previous = reuse_first ? kNone : list.tail;
  block.next = reuse_first ? list.head : kNone;
  (block.previous == kNone ? list.head : blocks_[block.previous].next) = index;
  (block.next == kNone ? list.tail : blocks_[block.next].previous) = index;
  ++list.count;
}

void BlockManager::remove_free(uint32_t index) {
  Block& block = blocks_[index];
  FreeList& list = list_of(block);
  (block.previous == kNone ? list.head : blocks_[block.previous].next) = block.next;
  (block.next == kNone ? list.tail : blocks_[block.next].previous) = block.previous;
  block.previous = block.next = kNone;
  --list.count;
}

void BlockManager::age() {
  while (free_[1].count > blocks_.size() - blocks_.size() / 4) {
    const uint32_t oldest = free_[1].head;
    remove_free(oldest);
    blocks_[oldest].found = false;
    push_free(oldest, false);
  }
}

void BlockManager::forget(Block& block) {
  if (!block.published) return;
  cached_.erase(block.hash);
  block.published = block.found = false;
}

bool BlockManager::allocate(size_t count, std::vector<uint32_t>* table) {
  if (count > free_blocks()) return false;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t index = next_free();
    remove_free(index);
    forget(blocks_[index]);
    blocks_[index].references = 1;
    table->push_back(index);
  }
  return true;
}

void BlockManager::add_references(std::span<const uint32_t> blocks) {
  for (uint32_t block : blocks) ++blocks_[block].references;
}

void BlockManager::release(std::span<const uint32_t> blocks) {
  for (size_t i = blocks.size(); i-- > 0;) {
    Block& block = blocks_[blocks[i]];
    // Blocks that no prompt can find are worth nothing: they go first.
    if (--block.references == 0) push_free(blocks[i], !block.published);
  }
  age();
}

BlockManager::Match BlockManager::find(std::span<const BlockHash> chain) const {
  Match match;
  for (const BlockHash& hash : chain) {
    const auto it = cached_.find(hash);
    if (it == cached_.end()) break;
    ++match.blocks;
    if (blocks_[it->second].references == 0) ++match.free_blocks;
  }
  return match;
}

void BlockManager::acquire(std::span<const BlockHash> chain, std::vector<uint32_t>* table) {
  for (const BlockHash& hash : chain) {
    const auto it = cached_.find(hash);
    if (it == cached_.end()) return;
    Block& block = blocks_[it->second];
    if (block.references++ == 0) remove_free(it->second);
    block.found = true;
    table->push_back(it->second);
  }
}

void BlockManager::publish(uint32_t index, const BlockHash& hash) {
  Block& block = blocks_[index];
  if (block.published || !cached_.try_emplace(hash, index).second) return;
  block.published = true;
  block.hash = hash;
}

uint64_t BlockManager::quarantine(const std::vector<uint32_t>& blocks) {
  quarantined_ += static_cast<uint32_t>(blocks.size());
  quarantine_.emplace(next_entry_, blocks);
  return next_entry_++;
}

void BlockManager::end_quarantine(uint64_t entry) {
  const auto it = quarantine_.find(entry);
  if (it == quarantine_.end()) return;
  quarantined_ -= static_cast<uint32_t>(it->second.size());
  release(it->second);
  quarantine_.erase(it);
}

absl::Status BlockManager::check_integrity(std::optional<uint64_t> references) const {
  uint32_t listed = 0;
  for (size_t found = 0; found < free_.size(); ++found) {
    const FreeList& list = free_[found];
    uint32_t previous = kNone, count = 0;
    for (uint32_t i = list.head; i != kNone; previous = i, i = blocks_[i].next) {
      const Block& block = blocks_[i];
      if (block.references != 0) {
        return absl::InternalError(
            absl::StrCat("block ", i, " is on a free list with ", block.references, " references"));
      }
      if (block.previous != previous || block.found != (found == 1) || ++count > blocks_.size()) {
        return absl::InternalError(absl::StrCat("free list ", found, " is broken at block ", i));
      }
    }
    if (list.tail != previous || list.count != count) {
      return absl::InternalError(
          absl::StrCat(count, " blocks are on free list ", found, ", ", list.count, " counted"));
    }
    listed += count;
  }
  uint32_t unused = 0;
  uint32_t published = 0;
  uint64_t total = 0;
  for (uint32_t i = 0; i < blocks_.size(); ++i) {
    const Block& block = blocks_[i];
    if (block.references == 0) ++unused;
    total += block.references;
    if (!block.published) continue;
    ++published;
    const auto it = cached_.find(block.hash);
    if (it == cached_.end() || it->second != i) {
      return absl::InternalError(absl::StrCat("block ", i, " is published but cannot be found"));
    }
  }
  if (listed != unused) {
    return absl::InternalError(
        absl::StrCat(unused, " blocks are unused, ", listed, " are on the free lists"));
  }
  if (published != cached_.size()) {
    return absl::InternalError(
        absl::StrCat(published, " blocks are published, the cache lists ", cached_.size()));
  }
  uint64_t held = 0;
  for (const auto& [entry, blocks] : quarantine_) held += blocks.size();
  if (held != quarantined_) {
    return absl::InternalError(absl::StrCat(held, " blocks are held, ", quarantined_, " counted"));
  }
  if (references.has_value() && total != *references + held) {
    return absl::InternalError(absl::StrCat("blocks have ", total, " references; ", *references,
                                            " and ", held, " of the quarantine are known"));
  }
  return absl::OkStatus();
}

static_assert(std::endian::native == std::endian::little, "hashes are defined over little endian");

BlockHash chain_hash(const BlockHash& parent, std::string_view bytes) {
  std::string input(reinterpret_cast<const char*>(&parent), sizeof(parent));
  input.append(bytes);
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const unsigned char*>(input.data()), input.size(), digest.data());
  BlockHash hash;
  std::memcpy(&hash, digest.data(), sizeof(hash));
  return hash;
}

BlockHash chain_hash(const BlockHash& parent, std::span<const int32_t> tokens) {
  return chain_hash(
      parent, std::string_view(reinterpret_cast<const char*>(tokens.data()), tokens.size_bytes()));
}

BlockHash model_root(std::string_view fingerprint) {
  // No chain goes on from zeros: a fingerprint cannot be taken for a block's tokens.
  return chain_hash(BlockHash{}, fingerprint);
}

void extend_chain(std::span<const int32_t> tokens, int block_tokens, const BlockHash& root,
                  std::vector<BlockHash>* chain) {
  const size_t full = tokens.size() / block_tokens;
  while (chain->size() < full) {
    const BlockHash parent = chain->empty() ? root : chain->back();
    chain->push_back(
        chain_hash(parent, tokens.subspan(chain->size() * block_tokens, block_tokens)));
  }
}

}  // namespace baton::engine::serve
