// When writes of adapters have to be flushed.
#include "gpudirect/flush_policy.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

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
  return absl::FailedPreconditionError(
      absl::StrCat("no dma-buf: CUDA device ", facts.ordinal,
                   " may see writes of adapters late, and its driver offers no flush to the host"));
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

absl::Status reachable_by_address(const Driver& driver, const DeviceFacts& facts, bool module) {
  if (!module) {
    return absl::UnavailableError(
        "no nvidia-peermem: that kernel module is not loaded (`modprobe nvidia-peermem`)");
  }
  if (driver.cuPointerSetAttribute == nullptr || !facts.has(kRdmaSupported)) {
    return absl::UnimplementedError(absl::StrCat("no nvidia-peermem: CUDA device ", facts.ordinal,
                                                 " does not let adapters access its memory"));
  }
  const absl::Status ordered = can_be_ordered(driver, facts);
  return ordered.ok()
             ? ordered
             : absl::Status(ordered.code(),
                            absl::StrCat("no nvidia-peermem: ",
                                         absl::StripPrefix(ordered.message(), "no dma-buf: ")));
}

bool peermem_loaded(const std::string& root) {
  for (const char* name : {"nvidia_peermem", "nv_peer_mem"}) {
    if (access(absl::StrCat(root, "/sys/module/", name).c_str(), F_OK) == 0) return true;
  }
  return false;
}

}  // namespace baton::gpudirect
