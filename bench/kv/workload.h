// A workload: which bytes of which pages one transfer moves, derived the same way on both sides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "bench/report/report.h"
#include "kvtransfer/kv_plan.h"
#include "transport/layout.h"

namespace baton::bench {

// How large the KV cache of a well-known model is.
struct KvModel {
  const char* name = "";
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;

  // Bytes of K and V of one head of one token, bf16.
  uint32_t head_token_bytes() const { return 2 * head_dim * 2; }
  size_t token_bytes() const { return size_t{layers} * kv_heads * head_token_bytes(); }
};

absl::Span<const KvModel> kv_models();

// InvalidArgument lists the names that are known.
absl::StatusOr<KvModel> find_kv_model(std::string_view name);

// The workload that the user asked for: pages of one size, or a model and the tokens of one
// request.
struct WorkloadSpec {
  size_t pages = 4096;
  size_t page_bytes = 16 << 10;
  bool scattered = true;  // pages in random order, every second one of the cache; else one run

  std::string model;  // "": pages and page_bytes count
  size_t tokens = 4096;
  uint32_t block_tokens = 16;
  uint32_t tp_source = 1;  // tensor-parallel degrees: heads are split over so many workers
  uint32_t tp_target = 1;

  static constexpr size_t kMaxBytes = size_t{1} << 40;

  Json to_json() const;
  // InvalidArgument: members missing or of the wrong type. The values are checked by make().
  static absl::StatusOr<WorkloadSpec> from_json(const Json& json);
};

// Page lists live here, so a workload stays where it is while transfers use its layouts.
class Workload {
 public:
  // InvalidArgument says which number is impossible.
  static absl::StatusOr<std::unique_ptr<Workload>> make(const WorkloadSpec& spec);
  Workload(const Workload&) = delete;
  Workload& operator=(const Workload&) = delete;

  // Bytes flow from the source layout to the target layout.
  const Layout& source() const { return source_; }
  const Layout& target() const { return target_; }
  size_t source_bytes() const { return source_bytes_; }  // size of the region it lies in
  size_t target_bytes() const { return target_bytes_; }
  size_t bytes() const { return source_.bytes(); }
  size_t pieces() const { return pieces_; }  // pages, or rows of heads where those are smaller
  size_t piece_bytes() const { return bytes() / pieces_; }

 private:
  Workload() = default;
  absl::Status make_pages(const WorkloadSpec& spec);
  absl::Status make_model(const WorkloadSpec& spec);

  std::vector<uint32_t> source_pages_;
  std::vector<uint32_t> target_pages_;
  Layout source_;
  Layout target_;
  size_t source_bytes_ = 0;
  size_t target_bytes_ = 0;
  size_t pieces_ = 1;
};

}  // namespace baton::bench
