// When writes of adapters have to be flushed.
#include "gpudirect/flush_policy.h"

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

}  // namespace baton::gpudirect
