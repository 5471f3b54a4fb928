// When writes of adapters have to be flushed.
#include "gpudirect/flush_policy.h"

#include "absl/strings/str_cat.h"

namespace baton::gpudirect {

FlushPolicy flush_policy(const DeviceFacts& facts) {
  if (facts.value(kRdmaWritesOrdering).value_or(kOrderedForNobody) >= kOrderedForOwner) {
    return FlushPolicy::kNone;
  }
  const int options = facts.value(kRdmaFlushWritesOptions).value_or(0);
  return (options & kFlushByHost) != 0 ? FlushPolicy::kCall : FlushPolicy::kImpossible;
}

const char* words(FlushPolicy policy) {
  switch (policy) {
    case FlushPolicy::kNone:
      return "ordered";
    case FlushPolicy::kCall:
      return "flushed by a call";
    case FlushPolicy::kImpossible:
      break;
  }
  return "not ordered and not flushed: staged";
}

absl::Status can_be_ordered(const Driver& driver, const DeviceFacts& facts) {
  const FlushPolicy policy = flush_policy(facts);
  const bool lacking = driver.cuFlushGPUDirectRDMAWrites == nullptr;
  if (policy == FlushPolicy::kNone || (policy == FlushPolicy::kCall && !lacking)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "no dma-buf: CUDA device ", facts.ordinal,
      " may see late what an adapter writes, and its driver offers no flush to the host"));
}

absl::Status reachable_by_adapters(const Driver& driver, const DeviceFacts& facts) {
  if (driver.cuMemGetHandleForAddressRange == nullptr) {
    return absl::UnimplementedError(
        "no dma-buf: the CUDA driver is older than 11.7; install a newer one");
  }
  if (!facts.has(kDmaBufSupported)) {
    return absl::UnimplementedError(absl::StrCat("no dma-buf: CUDA device ", facts.ordinal,
                                                 " exports none; it takes NVIDIA's open kernel "
                                                 "module and Linux 5.12 with CONFIG_PCI_P2PDMA"));
  }
  return can_be_ordered(driver, facts);
}

}  // namespace baton::gpudirect
