// Any wire message with random values in it (transport/base/fields.h), and what must hold for it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <type_traits>

#include "transport/base/fields.h"

namespace baton {

// Fills what fields() names.
class RandomFields {
 public:
  explicit RandomFields(uint32_t seed) : random_(seed) {}

  template <typename... Members>
  void operator()(Members&... members) {
    (put(members), ...);
  }
  template <typename Kind>
  void kind(Kind& kind, Kind last) {
    kind = static_cast<Kind>(1 + random_() % static_cast<uint8_t>(last));
  }
  template <typename List>
  void brief(List& list, size_t limit) {
    list.resize(below(std::min<size_t>(limit, 16) + 1));
    for (auto& element : list) put(element);
  }
  void require(bool holds) { holds_ &= holds; }
  void fill(size_t) {}
  uint32_t below(size_t limit) { return static_cast<uint32_t>(random_() % limit); }

 private:
  template <typename T>
  void put(T& value) {
    if constexpr (base::FieldMessage<T>) {
      do {
        holds_ = true;
        T::fields(*this, value);
      } while (!holds_);
    } else if constexpr (std::is_same_v<T, bool>) {
      value = below(2) == 1;
    } else if constexpr (std::is_same_v<T, absl::Status>) {
      const auto code = static_cast<absl::StatusCode>(below(17));
      value = absl::Status(code, std::string(below(700), 'w'));
    } else if constexpr (base::FieldList<T>) {
      value.resize(below(4));
      for (auto& element : value) put(element);
    } else {
      static_assert(base::FieldNumbers<T>);
      auto* bytes = reinterpret_cast<uint8_t*>(&value);
      for (size_t i = 0; i < sizeof(T); ++i) bytes[i] = static_cast<uint8_t>(random_());
    }
  }

  std::mt19937 random_;
  bool holds_ = true;
};

// What it writes is read again and written alike; cut, longer or damaged bytes are refused, or are
// another message's own.
template <typename Message>
void expect_wire_properties(uint32_t seed) {
  RandomFields random(seed);
  Message message;
  random(message);
  std::string bytes = "what was here before";
  const size_t before = bytes.size();
  base::write_fields(message, bytes);
  bytes.erase(0, before);
  const auto read = base::read_fields<Message>(bytes, "the message");
  ASSERT_TRUE(read.ok()) << read.status() << ", seed " << seed;
  std::string again;
  base::write_fields(*read, again);
  ASSERT_EQ(again, bytes) << "seed " << seed;
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::string cut = bytes.substr(0, size);  // exactly as long, for sanitizers
    ASSERT_FALSE(base::read_fields<Message>(cut, "it").ok()) << size << ", seed " << seed;
  }
  EXPECT_FALSE(base::read_fields<Message>(bytes + '\0', "it").ok()) << "seed " << seed;
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string damaged = bytes;
    damaged[i] = static_cast<char>(damaged[i] ^ (1 << random.below(8)));
    ASSERT_TRUE(base::refused_or_same<Message>(damaged)) << i << ", seed " << seed;
    damaged = bytes;  // lengths of 2^32 - 1, wherever there are some
    damaged.replace(i, 4, "\xff\xff\xff\xff");
    damaged.resize(bytes.size());
    ASSERT_TRUE(base::refused_or_same<Message>(damaged)) << i << ", seed " << seed;
  }
}

}  // namespace baton
