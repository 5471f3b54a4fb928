// safetensors: round trips, and every way in which a file can lie.
#include "engine/files/safetensors.h"

#include "engine/files/files.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::engine {
namespace {

using ::testing::HasSubstr;

// In a folder of this program.
std::string temporary(const std::string& name) {
  static const TemporaryFolder folder;
  return folder.path(name);
}

std::string image(const std::string& header, size_t data_bytes) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>((header.size() >> (8 * i)) & 0xff);
  return bytes + header + std::string(data_bytes, 'x');
}

std::string message(const std::string& bytes) {
  auto header = parse_safetensors(bytes);
  EXPECT_FALSE(header.ok());
  return header.ok() ? "" : std::string(header.status().message());
}

TEST(Safetensors, RoundTripsTensorsAndMetadata) {
  const std::string path = temporary("round.safetensors");
  const std::vector<uint16_t> a = {1, 2, 3, 4, 5, 6};
  const std::vector<float> b = {1.5f, -2.5f};
  const std::vector<TensorToWrite> tensors = {
      {"a", TensorType::kBf16, {2, 3}, std::as_bytes(std::span(a))},
      {"b", TensorType::kF32, {2}, std::as_bytes(std::span(b))},
      {"empty", TensorType::kF16, {0, 4}, {}}};
  ASSERT_TRUE(write_safetensors(path, tensors, {{"format", "pt"}}).ok());
  auto file = must(SafetensorsFile::open(path));
  EXPECT_EQ(file.header().metadata.at("format"), "pt");
  ASSERT_EQ(file.header().tensors.size(), 3u);
  const TensorInfo* info = *file.find("a");
  EXPECT_EQ(info->shape, (std::vector<size_t>{2, 3}));
  EXPECT_EQ(info->begin % 64, 0u) << "data is not aligned";
  EXPECT_EQ(file.data(*info), std::string_view(reinterpret_cast<const char*>(a.data()), 12));
  EXPECT_EQ((*file.find("b"))->type, TensorType::kF32);
  EXPECT_TRUE(absl::IsNotFound(file.find("c").status()));
  EXPECT_THAT(std::string(file.find("c").status().message()), HasSubstr(path));
}

TEST(Safetensors, EveryTruncationIsRefused) {
  const std::string path = temporary("cut.safetensors");
  const std::vector<uint16_t> a(40, 7);
  const std::vector<TensorToWrite> tensors = {
      {"a", TensorType::kBf16, {40}, std::as_bytes(std::span(a))}};
  ASSERT_TRUE(write_safetensors(path, tensors).ok());
  const std::string bytes = *read_file(path);
  ASSERT_TRUE(parse_safetensors(bytes).ok());
  for (size_t cut = 0; cut < bytes.size(); ++cut) {
    EXPECT_FALSE(parse_safetensors(bytes.substr(0, cut)).ok()) << cut;
  }
  EXPECT_FALSE(parse_safetensors(bytes + "x").ok()) << "bytes that belong to no tensor";
}

TEST(Safetensors, RefusesLies) {
  EXPECT_THAT(message(""), HasSubstr("0 bytes"));
  EXPECT_THAT(message(std::string(8, '\xff') + "{}"), HasSubstr("claims"));
  const auto a = [](const char* type, const char* shape, const char* offsets) {
    return absl::StrFormat(R"({"a":{"dtype":"%s","shape":%s,"data_offsets":%s}})", type, shape,
                           offsets);
  };
  const auto and_b = [](const char* offsets) {
    return absl::StrFormat(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
                               "b":{"dtype":"U8","shape":[4],"data_offsets":%s}})",
                           offsets);
  };
  const struct {
    std::string header;
    size_t data_bytes;
    const char* says;
  } cases[] = {
      {"not json", 0, "JSON"},
      {"[]", 0, "object"},
      {std::string(1000, '['), 0, "deep"},
      {R"({"a":1})", 0, "\"a\""},
      {a("F99", "[1]", "[0,4]"), 4, "F99"},
      {a("F32", "[2]", "[0,4]"), 4, "needs 8"},
      {a("F32", "[1]", "[0,4]"), 3, "truncated"},
      {a("F32", "[1]", "[4,0]"), 4, "lies at"},
      {a("F32", "[-1]", "[0,4]"), 4, "shape"},
      {a("F32", "[1.5]", "[0,4]"), 4, "shape"},
      {a("F32", "[4294967296,4294967296]", "[0,0]"), 0, "too large"},
      {a("F32", "[1]", "[0,18446744073709551615]"), 4, "lies at"},
      {a("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, "dimensions"},
      {and_b("[2,6]"), 6, "overlaps"},
      {and_b("[6,10]"), 10, "hole"},
      {R"({"__metadata__":{"a":1}})", 0, "__metadata__"},
  };
  for (const auto& [header, data_bytes, says] : cases) {
    EXPECT_THAT(message(image(header, data_bytes)), HasSubstr(says)) << header;
  }
}

TEST(Safetensors, OpenNamesTheFileThatIsWrong) {
  EXPECT_TRUE(absl::IsNotFound(SafetensorsFile::open("/does/not/exist").status()));
  EXPECT_FALSE(SafetensorsFile::open(::testing::TempDir()).ok());
  const std::string path = temporary("empty.safetensors");
  std::ofstream(path).close();
  auto file = SafetensorsFile::open(path);
  ASSERT_FALSE(file.ok());
  EXPECT_THAT(std::string(file.status().message()), HasSubstr(path));
}

TEST(Safetensors, WriterRefusesWhatItWouldWriteWrong) {
  const std::vector<uint16_t> a(4);
  const auto bytes = std::as_bytes(std::span(a));
  const std::string path = temporary("refused.safetensors");
  const std::vector<TensorToWrite> wrong_size = {{"a", TensorType::kF32, {4}, bytes}};
  const std::vector<TensorToWrite> twice = {{"a", TensorType::kBf16, {4}, bytes},
                                            {"a", TensorType::kBf16, {4}, bytes}};
  EXPECT_FALSE(write_safetensors(path, wrong_size).ok());
  EXPECT_FALSE(write_safetensors(path, twice).ok());
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace baton::engine
