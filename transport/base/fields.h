// Wire messages that name their members once, for writers, readers, tests and fuzzers alike.
//
//   struct Send {
//     uint64_t job = 0;
//     std::vector<uint32_t> blocks;
//     static void fields(auto& wire, auto& m) { wire(m.job, m.blocks); }
//   };
//   base::write_fields(send, bytes);
//   absl::StatusOr<Send> same = base::read_fields<Send>(bytes, "a send of rank 0");
//
// fields() may decide by members that it has named before:
//
//   wire.kind(m.kind, Kind::kLast);                          // 1 to kLast, in a byte
//   if (m.kind == Kind::kSend) wire(m.send);
//   wire.require(m.send.job != 0);                           // else the bytes are refused
//   wire.fill(kBytes);                                       // last: zeros, up to that size
//
// A number, or a struct of numbers without padding, is its little-endian bytes; a bool is 0 or 1; a
// text or vector is its 32-bit length and its elements; a status is its code and its message, of
// which kMaxWhy bytes are kept. A message has one encoding: bytes that are read are those that
// the message writes again, and all others are refused. A reader allocates for what the bytes hold,
// whatever length they claim.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "transport/base/wire.h"

namespace baton::base {

inline constexpr size_t kMaxWhy = 512;

class FieldWriter;
template <typename T>
concept FieldMessage = requires(FieldWriter& wire, const T& message) {
  T::fields(wire, message);
};
template <typename T>
concept FieldList = requires(T& list) {
  list.resize(1);
  list.data();
};
template <typename T>
concept FieldNumbers = !FieldMessage<T> && std::is_trivially_copyable_v<T> &&
                       std::has_unique_object_representations_v<T> && !std::is_pointer_v<T> &&
                       !std::is_enum_v<T> && !std::is_same_v<T, bool>;

class FieldWriter {
 public:
  // Appends.
  explicit FieldWriter(std::string& out) : out_(out), begin_(out.size()) {}

  template <typename... Members>
  void operator()(const Members&... members) {
    (put(members), ...);
  }
  template <typename Kind>
  void kind(Kind kind, Kind /*last*/) {
    put_number(out_, static_cast<uint8_t>(kind));
  }
  void require(bool) {}
  void fill(size_t size) { out_.resize(begin_ + size); }

 private:
  template <typename T>
  void put(const T& value) {
    if constexpr (FieldMessage<T>) {
      T::fields(*this, value);
    } else if constexpr (std::is_same_v<T, bool>) {
      put_number(out_, static_cast<uint8_t>(value));
    } else if constexpr (std::is_same_v<T, absl::Status>) {
      put_number(out_, static_cast<uint8_t>(value.code()));
      put(std::string(value.message().substr(0, kMaxWhy)));
    } else if constexpr (FieldList<T>) {
      using Element = typename T::value_type;
      put_number(out_, static_cast<uint32_t>(value.size()));
      if constexpr (FieldNumbers<Element>) {
        out_.append(reinterpret_cast<const char*>(value.data()), value.size() * sizeof(Element));
      } else {
        for (const Element& element : value) put(element);
      }
    } else {
      static_assert(FieldNumbers<T>, "name an enum with kind(), and the members of other structs");
      out_.append(reinterpret_cast<const char*>(&value), sizeof(T));
    }
  }

  std::string& out_;
  const size_t begin_;
};

class FieldReader {
 public:
  explicit FieldReader(std::string_view bytes) : size_(bytes.size()), rest_(bytes) {}

  template <typename... Members>
  void operator()(Members&... members) {
    (take(members), ...);
  }
  template <typename Kind>
  void kind(Kind& kind, Kind last) {
    const auto number = take<uint8_t>();
    require(number >= 1 && number <= static_cast<uint8_t>(last));
    kind = static_cast<Kind>(number);
  }
  void require(bool holds) { failed_ |= !holds; }
  void fill(size_t size) {
    require(bytes(size - at()).find_first_not_of('\0') == std::string_view::npos);
  }
  size_t at() const { return size_ - rest_.size(); }
  bool finished() const { return !failed_ && rest_.empty(); }

 private:
  // As many, or none and failure.
  std::string_view bytes(size_t count) {
    require(count <= rest_.size());
    const std::string_view taken = rest_.substr(0, failed_ ? 0 : count);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  template <typename T>
  T take() {
    T value{};
    take(value);
    return value;
  }
  template <typename T>
  void take(T& value) {
    if constexpr (FieldMessage<T>) {
      T::fields(*this, value);
    } else if constexpr (std::is_same_v<T, bool>) {
      const auto number = take<uint8_t>();
      require(number <= 1);
      value = number == 1;
    } else if constexpr (std::is_same_v<T, absl::Status>) {
      const auto code = take<uint8_t>();
      const auto why = take<std::string>();
      require(code <= static_cast<uint8_t>(absl::StatusCode::kUnauthenticated) &&
              why.size() <= kMaxWhy && (code != 0 || why.empty()));
      value = absl::Status(static_cast<absl::StatusCode>(code), why);
    } else if constexpr (FieldList<T>) {
      using Element = typename T::value_type;
      const size_t count = take<uint32_t>();
      value.clear();
      if constexpr (FieldNumbers<Element>) {
        const std::string_view taken = bytes(count * sizeof(Element));
        value.resize(taken.size() / sizeof(Element));
        if (!taken.empty()) std::memcpy(value.data(), taken.data(), taken.size());
      } else {
        require(count <= rest_.size());  // an element has a byte at least
        for (size_t i = 0; i < count && !failed_; ++i) take(value.emplace_back());
      }
    } else {
      static_assert(FieldNumbers<T>, "name an enum with kind(), and the members of other structs");
      const std::string_view taken = bytes(sizeof(T));
      if (!taken.empty()) std::memcpy(&value, taken.data(), sizeof(T));
    }
  }

  const size_t size_;
  std::string_view rest_;
  bool failed_ = false;
};

// Appends.
template <FieldMessage Message>
void write_fields(const Message& message, std::string& out) {
  FieldWriter writer(out);
  writer(message);
}

// Internal: bytes that no peer of this build sends. `what` names them for people.
template <FieldMessage Message>
absl::StatusOr<Message> read_fields(std::string_view bytes, std::string_view what) {
  Message message;
  FieldReader reader(bytes);
  reader(message);
  if (reader.finished()) return message;
  return absl::InternalError(absl::StrCat(std::string(what), " (", bytes.size(),
                                          " bytes) is wrong at byte ", reader.at(),
                                          ": run the same release at both ends"));
}

// For tests and fuzzers: these bytes are refused, or are those that the message writes again.
template <FieldMessage Message>
bool refused_or_same(std::string_view bytes) {
  const absl::StatusOr<Message> message = read_fields<Message>(bytes, "an input");
  std::string again;
  if (message.ok()) write_fields(*message, again);
  return !message.ok() || again == bytes;
}

}  // namespace baton::base
