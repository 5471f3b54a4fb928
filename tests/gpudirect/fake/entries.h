// How each of the fake's functions is entered: as a call of the driver, with the same beginning.
#pragma once

#include <algorithm>

#include "tests/gpudirect/fake/fake_driver.h"

namespace baton::gpudirect {

// The name of a call, as an argument of a template.
struct CallName {
  template <size_t kSize>
  constexpr CallName(const char (&name)[kSize]) {
    std::copy_n(name, kSize, text);
  }
  char text[48] = {};
};

// What a call needs, and what it does besides: it blocks; it takes something away, which is done
// also where the call fails; it says itself what it answers where the call fails.
inline constexpr unsigned kNothing = 0, kDriver = 1, kContext = 2;
inline constexpr unsigned kBlocks = 4, kTakes = 8, kSaysItself = 16;

template <auto kFunction, CallName kName, unsigned kTraits>
struct Entered;
template <typename... Arguments, Result (*kFunction)(const FakeCall&, Arguments...), CallName kName,
          unsigned kTraits>
struct Entered<kFunction, kName, kTraits> {
  static Result call(Arguments... arguments) {
    const FakeCall call(kName.text, static_cast<FakeCall::Needs>(kTraits % kBlocks),
                        (kTraits & kBlocks) != 0);
    constexpr bool kAway = (kTraits & kTakes) != 0;
    const bool goes_on =
        (kTraits & kSaysItself) != 0 || (kAway ? call.takes_away() : call.refused() == kSuccess);
    if (!goes_on) return call.refused();
    const Result said = kFunction(call, arguments...);
    return kAway && said == kSuccess ? call.told() : said;
  }
};

template <auto kFunction, CallName kName, unsigned kTraits>
void add_call(FakeEntries& out, int version) {
  out[kName.text] = {reinterpret_cast<void*>(Entered<kFunction, kName, kTraits>::call), version};
}

}  // namespace baton::gpudirect
