# Makes the folder `to` a picture of the Python package in `from`: every file a relative symbolic link, links to files that
# are gone removed; and the folder `headers` as its folder include, where the installed package has them. Run by the
# build.
cmake_minimum_required(VERSION 3.22)
file(GLOB_RECURSE files RELATIVE "${from}" "${from}/*.py" "${from}/*.pyi" "${from}/py.typed")
foreach(file ${files})
    get_filename_component(folder "${to}/${file}" DIRECTORY)
    file(MAKE_DIRECTORY "${folder}")
    file(RELATIVE_PATH target "${folder}" "${from}/${file}")
    file(CREATE_LINK "${target}" "${to}/${file}" SYMBOLIC)
endforeach()
file(GLOB_RECURSE links "${to}/*.py" "${to}/*.pyi" "${to}/py.typed")
foreach(link ${links})
    if(IS_SYMLINK "${link}" AND NOT EXISTS "${link}")
        file(REMOVE "${link}")
    endif()
endforeach()
file(RELATIVE_PATH target "${to}" "${headers}")
file(CREATE_LINK "${target}" "${to}/include" SYMBOLIC)
