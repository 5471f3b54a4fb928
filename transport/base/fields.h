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
//   wire.brief(m.name, kMaxName);                            // a text or vector of at most so many
//   wire.require(m.send.job != 0);                           // else the bytes are refused
//   wire.fill(kBytes);                                       // last: zeros, up to that size
//
// A number, or a struct of numbers without padding, is its little-endian bytes; a bool is 0 or 1; a
// text or vector is its 32-bit length and its elements (brief ones have a 16-bit length); a status
// is its code and its message, of which kMaxWhy bytes are kept. A type with encode() and decode()
// is what these make of it: kEncodedBytes where it names them, else behind a 32-bit length. But for
// such types, a message has one encoding: bytes that are read are those that the message writes
// again, and all others are refused. A reader allocates for what the bytes hold, whatever length
// they claim.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace baton::base {

inline constexpr size_t kMaxWhy = 512;

template <bool kReads>
class FieldWire;
using FieldReader = FieldWire<true>;
using FieldWriter = FieldWire<false>;  // appends

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
concept FieldCoded = requires(const T& value) {
  value.encode();
  T::decode(std::string_view());
};
template <typename T>
concept FieldNumbers = !FieldMessage<T> && !FieldCoded<T> && std::is_trivially_copyable_v<T> &&
                       std::has_unique_object_representations_v<T> && !std::is_pointer_v<T> &&
                       !std::is_enum_v<T> && !std::is_same_v<T, bool>;

template <bool kReads>
class FieldWire {
 public:
  using Bytes = std::conditional_t<kReads, std::string_view, std::string&>;
  explicit FieldWire(Bytes bytes) : bytes_(bytes), size_(bytes.size()) {}

  void operator()(auto&... members) { (one(members), ...); }
  template <typename Kind>
  void kind(Kind& kind, std::remove_const_t<Kind> last) {
    auto number = static_cast<uint8_t>(kind);
    one(number);
    require(number >= 1 && number <= static_cast<uint8_t>(last));
    if constexpr (kReads) kind = static_cast<Kind>(number);
  }
  void brief(auto& list, size_t limit) {
    auto count = static_cast<uint16_t>(list.size());
    one(count);
    require(count <= limit);
    elements(list, count);
  }
  void require(bool holds) { failed_ |= kReads && !holds; }
  void fill(size_t size) {
    if constexpr (kReads) {
      require(bytes_.size() == size - at() &&
              bytes_.find_first_not_of('\0') == std::string_view::npos);
      if (!failed_) bytes_ = {};
    } else {
      bytes_.resize(size_ + size);
    }
  }
  // For readers:
  size_t at() const { return size_ - bytes_.size(); }
  bool finished() const { return !failed_ && bytes_.empty(); }
  const absl::Status& why() const { return why_; }  // what a decode() said

 private:
  template <typename Value>
  void one(Value& value) {
    using T = std::remove_const_t<Value>;
    if constexpr (FieldMessage<T>) {
      T::fields(*this, value);
    } else if constexpr (std::is_same_v<T, bool>) {
      auto number = static_cast<uint8_t>(value);
      one(number);
      require(number <= 1);
      if constexpr (kReads) value = number == 1;
    } else if constexpr (std::is_same_v<T, absl::Status>) {
      auto code = static_cast<uint8_t>(value.code());
      std::string why(value.message().substr(0, kMaxWhy));
      (*this)(code, why);
      require(code <= static_cast<uint8_t>(absl::StatusCode::kUnauthenticated) &&
              why.size() <= kMaxWhy && (code != 0 || why.empty()));
      if constexpr (kReads) value = absl::Status(static_cast<absl::StatusCode>(code), why);
    } else if constexpr (FieldCoded<T>) {
      coded(value);
    } else if constexpr (FieldList<T>) {
      auto count = static_cast<uint32_t>(value.size());
      one(count);
      elements(value, count);
    } else {
      static_assert(FieldNumbers<T>, "name an enum with kind(), and the members of other structs");
      raw(&value, sizeof(T));
    }
  }
  template <typename List>
  void elements(List& list, size_t count) {
    using Element = typename std::remove_const_t<List>::value_type;
    if constexpr (FieldNumbers<Element>) {
      require(count <= bytes_.size() / sizeof(Element));
      if constexpr (kReads) list.resize(failed_ ? 0 : count);
      raw(list.data(), list.size() * sizeof(Element));
    } else if constexpr (kReads) {
      require(count <= bytes_.size());  // an element has a byte at least
      for (list.clear(); list.size() < count && !failed_;) one(list.emplace_back());
    } else {
      for (auto& element : list) one(element);
    }
  }
  template <typename Value>
  void coded(Value& value) {
    if constexpr (kReads) {
      uint32_t size = 0;
      if constexpr (requires { Value::kEncodedBytes; }) {
        size = Value::kEncodedBytes;
      } else {
        one(size);
      }
      require(size <= bytes_.size());
      if (failed_) return;
      auto decoded = Value::decode(bytes_.substr(0, size));
      bytes_.remove_prefix(size);
      why_ = decoded.status();
      require(decoded.ok());
      if (decoded.ok()) value = *std::move(decoded);
    } else {
      std::string bytes = value.encode();
      if constexpr (requires { Value::kEncodedBytes; }) {
        raw(bytes.data(), bytes.size());
      } else {
        one(bytes);
      }
    }
  }
  void raw(auto* data, size_t size) {
    if constexpr (kReads) {
      require(size <= bytes_.size());
      if (failed_ || size == 0) return;
      std::memcpy(data, bytes_.data(), size);
      bytes_.remove_prefix(size);
    } else {
      bytes_.append(reinterpret_cast<const char*>(data), size);
    }
  }

  Bytes bytes_;  // of a reader: those that are left
  const size_t size_;
  bool failed_ = false;
  absl::Status why_;
};

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
