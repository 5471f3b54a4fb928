// safetensors: header validation, mmap reader, atomic writer.
#include "engine/files/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "engine/files/files.h"
#include "engine/files/json_fields.h"
#include "engine/files/utf8.h"

namespace baton::engine {
namespace {

constexpr size_t kLengthBytes = 8;
constexpr size_t kMaxHeader = 100'000'000;  // the limit of the reference implementation
constexpr size_t kMaxRank = 8;
constexpr size_t kDataAlignment = 64;

struct NamedType {
  const char* name;
  TensorType type;
  size_t bytes;
};
constexpr NamedType kTypes[] = {
    {"F32", TensorType::kF32, 4},       {"F16", TensorType::kF16, 2},
    {"BF16", TensorType::kBf16, 2},     {"F64", TensorType::kOther, 8},
    {"I64", TensorType::kOther, 8},     {"U64", TensorType::kOther, 8},
    {"I32", TensorType::kOther, 4},     {"U32", TensorType::kOther, 4},
    {"I16", TensorType::kOther, 2},     {"U16", TensorType::kOther, 2},
    {"I8", TensorType::kOther, 1},      {"U8", TensorType::kOther, 1},
    {"BOOL", TensorType::kOther, 1},    {"F8_E4M3", TensorType::kOther, 1},
    {"F8_E5M2", TensorType::kOther, 1},
};

absl::Status bad_file(std::string_view message) {
  return absl::InvalidArgumentError(absl::StrCat("safetensors: ", view(message)));
}

absl::Status bad_tensor(std::string_view name, std::string_view message) {
  return bad_file(absl::StrCat("tensor \"", view(name.substr(0, 200)), "\" ", view(message)));
}

absl::StatusOr<TensorInfo> read_tensor(const std::string& name, const nlohmann::json& json,
                                       size_t data_begin, size_t data_bytes) {
  TensorInfo info;
  info.name = name;
  const nlohmann::json& dtype = member(json, "dtype");
  const nlohmann::json& shape = member(json, "shape");
  const nlohmann::json& offsets = member(json, "data_offsets");
  if (!dtype.is_string() || !shape.is_array() || !offsets.is_array() || offsets.size() != 2) {
    return bad_tensor(name, "needs dtype, shape and two data_offsets");
  }
  const std::string& type_name = dtype.get_ref<const std::string&>();
  const auto* type = std::find_if(std::begin(kTypes), std::end(kTypes),
                                  [&](const NamedType& t) { return type_name == t.name; });
  if (type == std::end(kTypes)) {
    return bad_tensor(name, absl::StrCat("has unknown dtype \"", type_name.substr(0, 32), "\""));
  }
  info.type = type->type;
  if (shape.size() > kMaxRank) return bad_tensor(name, "has too many dimensions");
  size_t bytes = type->bytes;
  for (const nlohmann::json& extent : shape) {
    if (!extent.is_number_unsigned())
      return bad_tensor(name, "has a shape with entries that are not counts");
    const size_t count = extent.get<size_t>();
    if (count != 0 && bytes > std::numeric_limits<size_t>::max() / count) {
      return bad_tensor(name, "has a shape too large for this machine");
    }
    bytes *= count;
    info.shape.push_back(count);
  }
  if (!offsets[0].is_number_unsigned() || !offsets[1].is_number_unsigned()) {
    return bad_tensor(name, "has data_offsets that are not counts");
  }
  const size_t begin = offsets[0].get<size_t>(), end = offsets[1].get<size_t>();
  if (begin > end || end > data_bytes) {
    return bad_tensor(name, absl::StrCat("lies at [", begin, ", ", end, ") but the file has ",
                                         data_bytes, " bytes of data; is it truncated?"));
  }
  if (end - begin != bytes) {
    return bad_tensor(name,
                      absl::StrCat("has ", end - begin, " bytes where its shape needs ", bytes));
  }
  info.begin = data_begin + begin;
  info.end = data_begin + end;
  return info;
}

absl::Status check_coverage(const SafetensorsHeader& header, size_t data_begin, size_t file_bytes) {
  std::vector<const TensorInfo*> order;
  for (const auto& [name, info] : header.tensors) order.push_back(&info);
  std::sort(order.begin(), order.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  size_t at = data_begin;
  for (const TensorInfo* info : order) {
    if (info->begin < at) return bad_tensor(info->name, "overlaps another tensor");
    if (info->begin > at) return bad_tensor(info->name, "follows a hole in the data");
    at = info->end;
  }
  if (at != file_bytes) {
    return bad_file(
        absl::StrCat(file_bytes - at, " bytes after the last tensor belong to no tensor"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view tensor_type_name(TensorType type) {
  switch (type) {
    case TensorType::kF32:
      return "F32";
    case TensorType::kF16:
      return "F16";
    case TensorType::kBf16:
      return "BF16";
    case TensorType::kOther:
      break;
  }
  return "another type";
}

size_t TensorInfo::elements() const {
  size_t count = 1;
  for (const size_t extent : shape) count *= extent;
  return count;
}

absl::StatusOr<SafetensorsHeader> parse_safetensors(std::string_view bytes) {
  if (bytes.size() < kLengthBytes) {
    return bad_file(
        absl::StrCat("the file has ", bytes.size(), " bytes; the header length needs 8"));
  }
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    length |= uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  if (length > kMaxHeader || length > bytes.size() - kLengthBytes) {
    return bad_file(absl::StrCat("the header claims ", length, " bytes but the file has ",
                                 bytes.size() - kLengthBytes,
                                 " after the length; it is truncated or not safetensors"));
  }
  auto json = parse_json(bytes.substr(kLengthBytes, length), "safetensors header");
  if (!json.ok()) return json.status();
  if (!json->is_object()) return bad_file("the header must be an object");

  SafetensorsHeader header;
  const size_t data_begin = kLengthBytes + length;
  for (const auto& [name, value] : json->items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) return bad_file("__metadata__ must be an object");
      for (const auto& [key, text] : value.items()) {
        if (!text.is_string()) return bad_file("__metadata__ must hold strings");
        header.metadata[key] = text.get<std::string>();
      }
      continue;
    }
    auto info = read_tensor(name, value, data_begin, bytes.size() - data_begin);
    if (!info.ok()) return info.status();
    header.tensors.emplace(name, *std::move(info));
  }
  if (absl::Status status = check_coverage(header, data_begin, bytes.size()); !status.ok()) {
    return status;
  }
  return header;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("opening ", path, " failed"));
  struct stat info {};
  const bool regular = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  const size_t size = regular ? static_cast<size_t>(info.st_size) : 0;
  void* memory = size > 0 ? ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
  const int error = errno;
  ::close(fd);
  if (!regular || size == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, regular ? " is empty" : " is not a regular file"));
  }
  if (memory == MAP_FAILED) {
    return absl::ErrnoToStatus(error, absl::StrCat("mapping ", path, " failed"));
  }
  SafetensorsFile file;
  file.path_ = path;
  file.mapping_ = std::shared_ptr<const char>(
      static_cast<const char*>(memory),
      [size](const char* base) { ::munmap(const_cast<char*>(base), size); });
  auto header = parse_safetensors({file.mapping_.get(), size});
  if (!header.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", header.status().message()));
  }
  file.header_ = *std::move(header);
  return file;
}

absl::StatusOr<const TensorInfo*> SafetensorsFile::find(std::string_view name) const {
  const auto it = header_.tensors.find(name);
  if (it == header_.tensors.end()) {
    return absl::NotFoundError(absl::StrCat(path_, " has no tensor \"", view(name), "\""));
  }
  return &it->second;
}

std::string_view SafetensorsFile::data(const TensorInfo& info) const {
  return {mapping_.get() + info.begin, info.end - info.begin};
}

absl::Status write_safetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                               const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  size_t offset = 0;
  for (const TensorToWrite& tensor : tensors) {
    size_t bytes = tensor.type == TensorType::kF32 ? 4 : 2;
    for (const size_t extent : tensor.shape) bytes *= extent;
    if (tensor.type == TensorType::kOther || bytes != tensor.data.size() ||
        json.contains(tensor.name)) {
      return bad_tensor(tensor.name, "cannot be written: its type, size or name is wrong");
    }
    json[tensor.name] = {{"dtype", std::string(tensor_type_name(tensor.type))},
                         {"shape", tensor.shape},
                         {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string header = json.dump();
  header.append((kDataAlignment - (kLengthBytes + header.size()) % kDataAlignment) % kDataAlignment,
                ' ');
  std::string length(kLengthBytes, '\0');
  for (size_t i = 0; i < kLengthBytes; ++i) {
    length[i] = static_cast<char>((uint64_t{header.size()} >> (8 * i)) & 0xff);
  }
  std::vector<std::string_view> pieces = {length, header};
  for (const TensorToWrite& tensor : tensors) {
    pieces.emplace_back(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size());
  }
  return write_file_atomically(path, pieces);
}

}  // namespace baton::engine
