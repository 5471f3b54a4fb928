// Checksums of pieces: their runs are looked up once, and gathered for each piece.
#include "kvtransfer/kv_checksums.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/plans/kv_boxes.h"

namespace baton::kvtransfer {
namespace {

// The CRC-32 of what is added to it. Short runs are gathered first: a call for each would cost
// more.
class Crc {
 public:
  void add(const unsigned char* bytes, size_t count) {
    if (count >= buffer_.size()) {
      flush();
      value_ = crc32_z(value_, bytes, count);
      return;
    }
    if (used_ + count > buffer_.size()) flush();
    std::memcpy(buffer_.data() + used_, bytes, count);
    used_ += count;
  }
  uint32_t value() {
    flush();
    return static_cast<uint32_t>(value_);
  }

 private:
  void flush() { value_ = crc32_z(value_, buffer_.data(), std::exchange(used_, 0)); }
  uLong value_ = crc32_z(0, nullptr, 0);
  size_t used_ = 0;
  std::array<unsigned char, 4096> buffer_;
};

}  // namespace

absl::StatusOr<KvChecksums> KvChecksums::make(const KvLayout& source, const KvLayout& target,
                                              const KvShare& share) {
  if (source.groups.size() != 1 || target.groups.size() != 1) {
    return absl::InvalidArgumentError(
        "checksums cover layouts of one group: make one for each group");
  }
  absl::StatusOr<KvPlan> plan = KvPlan::make(source, target, share);
  if (!plan.ok()) return plan.status();
  KvChecksums out;
  out.plan_ = *std::move(plan);
  if (out.plan_.parts().empty() || out.plan_.parts()[0].boxes.empty()) return out;
  const KvPart& part = out.plan_.parts()[0];
  try {
    for (uint32_t b = 0; b < part.boxes.size(); ++b) {
      std::vector<Run> runs = {{0, 0, b}};
      for (const KvBoxDim& dim : part.boxes[b].dims) {
        if (dim.count > (kMaxRuns - out.runs_.size()) / runs.size()) {
          return absl::ResourceExhaustedError(absl::StrCat(
              "a piece of ", part.unit, " tokens is in more than ", kMaxRuns, " runs of ",
              part.boxes[b].piece_bytes, " bytes: its checksum would be too slow"));
        }
        std::vector<Run> more;
        more.reserve(runs.size() * dim.count);
        for (const Run& run : runs) {
          for (uint64_t i = 0; i < dim.count; ++i) {
            more.push_back(
                {run.source + i * dim.source_stride, run.target + i * dim.target_stride, b});
          }
        }
        runs = std::move(more);
      }
      out.runs_.insert(out.runs_.end(), runs.begin(), runs.end());
    }
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("no memory for the runs of a piece");
  }
  // As in the first layer's first unit of a block of the target.
  const auto place = [&](const Run& run) {
    const KvBox& box = part.boxes[run.box];
    const KvPlace& at =
        target.groups[0].fields[box.target_field].places[part.layers[0].target_index];
    return std::pair(at.buffer, at.offset + box.target_offset + run.target);
  };
  std::stable_sort(out.runs_.begin(), out.runs_.end(),
                   [&](const Run& a, const Run& b) { return place(a) < place(b); });
  return out;
}

uint32_t KvChecksums::unit() const { return runs_.empty() ? 0 : plan_.parts()[0].unit; }

uint64_t KvChecksums::run_bytes() const {
  return runs_.size() == 1 ? plan_.parts()[0].boxes[0].piece_bytes : 0;
}

absl::Status KvChecksums::add(Side side, absl::Span<const uint64_t> addresses, KvTokens tokens,
                              const KvPages& pages, uint32_t layer,
                              std::vector<uint32_t>& out) const {
  if (runs_.empty()) return absl::OkStatus();
  uint32_t index = 0;
  const KvPart* part = plan_.find_layer(layer, &index);
  if (part == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("nothing of layer ", layer, " moves"));
  }
  const bool source = side == Side::kSource;
  const KvLayout& layout = source ? plan_.source() : plan_.target();
  const KvGroup& group = layout.groups[0];
  if (addresses.size() != layout.buffers.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(addresses.size(), " addresses for ", layout.buffers.size(), " buffers"));
  }
  if (tokens.empty()) return absl::OkStatus();
  const absl::Status good = check_kv_pages(source ? "source" : "target", group, pages, tokens);
  if (!good.ok()) return good;
  struct Base {
    uint64_t address;
    uint64_t block_stride;
    uint64_t unit_stride;
    uint64_t bytes;
  };
  absl::InlinedVector<Base, 4> bases;  // of the boxes
  for (const KvBox& box : part->boxes) {
    const KvField& field = group.fields[source ? box.source_field : box.target_field];
    const KvPart::Layer& which = part->layers[index];
    const KvPlace& place = field.places[source ? which.source_index : which.target_index];
    if (layout.buffers[place.buffer].device != KvDevice::kHost) {
      return absl::InvalidArgumentError(
          "checksums are computed on the CPU, but the cache is device memory");
    }
    bases.push_back(
        {addresses[place.buffer] + place.offset + (source ? box.source_offset : box.target_offset),
         field.block_stride, source ? box.source_unit_stride : box.target_unit_stride,
         box.piece_bytes});
  }
  const uint64_t units = group.block_tokens / part->unit;  // of a block
  const uint64_t end = (tokens.end - 1) / part->unit + 1;
  for (uint64_t at = tokens.begin / part->unit; at < end; ++at) {
    const uint64_t page = pages.pages[at / units - pages.first_block];
    Crc crc;
    for (const Run& run : runs_) {
      const Base& base = bases[run.box];
      const uint64_t address = base.address + page * base.block_stride +
                               at % units * base.unit_stride + (source ? run.source : run.target);
      crc.add(reinterpret_cast<const unsigned char*>(address), base.bytes);
    }
    out.push_back(crc.value());
  }
  return absl::OkStatus();
}

}  // namespace baton::kvtransfer
