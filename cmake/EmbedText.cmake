# Converts the text file `from` to the C file `to` at build time: a NUL-terminated array `name`, and `name`_size without
# the NUL. As numbers, since C17 guarantees string literals of 4095 characters only.
cmake_minimum_required(VERSION 3.22)
file(READ "${from}" bytes HEX)
string(LENGTH "${bytes}" digits)
math(EXPR size "${digits} / 2")
string(REGEX REPLACE "(................................................................)" "\\1\n    " bytes "${bytes}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1, " bytes "${bytes}")
file(WRITE "${to}" "#include \"kernel/prelude.h\"\n\nconst char ${name}[] = {\n    ${bytes}0x00};\nconst size_t ${name}_size = ${size};\n")
